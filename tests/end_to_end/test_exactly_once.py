"""Exactly once: SIGKILL loses no record, repeats none, and changes no bit of the weights."""

import os
import random
from itertools import islice
from pathlib import Path

import orjson
import pytest

from benchmarks.data import read_task
from tests.broker import Broker
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon, configuration
from tests.learners import differences

DATA = Path(__file__).parents[3] / "shared/data/superni"
TASKS = ("task002", "task1290", "task1729", "task363", "task875")
PER_TASK, BAD, KILLS = 240, 24, 5
TAIL = 16  # records after the last one trained on; they wait for more records (shift.lookahead_records)
UNUSABLE = (b"not json", b"", b'{"text": 5}', b'{"prompt": "no completion"}', b"[" * 100, b'{"input_ids": [99999999]}')
PER_BATCH = 8
GOOD = PER_TASK * len(TASKS)
STEPS = GOOD // PER_BATCH

pytestmark = [
    pytest.mark.broker,
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason="the shared SuperNI data is not beside the repository"),
]


@pytest.fixture(scope="module")
def records() -> list[bytes]:
    """SuperNI records of five tasks with unusable ones mixed in, the last one usable, and a tail."""
    rows = {task: [orjson.dumps(row) for row in islice(read_task(DATA, task, "train"), PER_TASK)] for task in TASKS}
    values = [row for task in TASKS for row in rows[task]]
    assert len(values) == GOOD
    tail = values[-TAIL:]
    rng = random.Random(7)
    for number in range(BAD):
        values.insert(rng.randrange(len(values)), UNUSABLE[number % len(UNUSABLE)])
    return values + tail


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_backbone(tmp_path_factory.mktemp("backbone"))


def scrambled(value: bytes) -> bytes:
    """The record with a different `meta`; unusable records unchanged."""
    if value in UNUSABLE:
        return value
    return orjson.dumps({**orjson.loads(value), "meta": {"noise": os.urandom(8).hex()}})


def kill_steps(seed: int) -> list[int]:
    """Five steps at which to kill the daemon, in order."""
    return sorted(random.Random(seed).sample(range(5, STEPS), KILLS))


def dead_letter_origins(broker: Broker, topic: str) -> list[tuple[bytes, bytes, bytes]]:
    """Topic, partition and offset of the original record of each dead letter."""
    prefix = "__streamlearn.errors."
    headers = [dict(message.headers) for message in broker.read_all(topic)]
    return [(h[f"{prefix}topic"], h[f"{prefix}partition"], h[f"{prefix}offset"]) for h in headers]


def test_killed_five_times_the_final_state_equals_an_uninterrupted_run(
    broker: Broker, records: list[bytes], backbone: Path, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """One partition: every tensor is bit-equal, and every record was trained on or dead-lettered exactly once.

    The killed run reads the same records with other keys and another `meta`: learning must not depend on them.
    """
    runs = {}
    for name, kills in (("whole", []), ("killed", kill_steps(seed=11))):
        topic, dead = broker.new_topic(), broker.new_topic()
        if kills:
            for start in range(0, len(records), 500):
                some = [scrambled(value) for value in records[start : start + 500]]
                broker.produce(topic, some, key=os.urandom(4))
        else:
            broker.produce(topic, records)
        process = ForkedDaemon if kills else DaemonProcess  # so the seeds of Python's hashes differ
        daemon = process(tmp_path / name, configuration(broker, topic, dead, backbone, PER_BATCH))
        daemons.append(daemon)
        daemon.learn(STEPS, kills)
        assert daemon.terminate() == 0
        runs[name] = daemon.newest()
        written = dead_letter_origins(broker, dead)
        assert len(written) == len(set(written)) == BAD
        assert runs[name].ledger() == {0: (GOOD, BAD, GOOD + BAD)}
        (committed, note) = broker.committed(f"group-{topic}-{dead}")[(topic, 0)]
        assert (committed, note) == (GOOD + BAD, f"{STEPS:08d}")

    whole, killed = runs["whole"].tensors(), runs["killed"].tensors()
    assert differences(whole, killed) == []
    trained = [name for name in whole if name.endswith("exp_avg") and bool(whole[name].any())]
    assert trained, "the comparison would be empty if nothing had been learned"


@pytest.mark.long
def test_three_partitions_killed_five_times_keep_an_exact_ledger(
    broker: Broker, records: list[bytes], backbone: Path, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """Per partition: position = trained + dead-lettered, and each dead letter was written once."""
    topic, dead = broker.new_topic(partitions=3), broker.new_topic()
    parts = [records[0::3], records[1::3], records[2::3]]
    for partition, part in enumerate(parts):
        broker.produce(topic, part, partition=partition)
    daemon = ForkedDaemon(tmp_path / "three", configuration(broker, topic, dead, backbone, PER_BATCH))
    daemons.append(daemon)
    daemon.learn(STEPS, kill_steps(seed=12))
    assert daemon.terminate() == 0

    ledger = daemon.newest().ledger()
    assert sum(trained for trained, _, _ in ledger.values()) == GOOD
    # The dead letter of a record after the last full batch is already written; the ledger counts it with its batch.
    for partition in range(len(parts)):
        trained, dead_lettered, position = ledger[partition]
        assert trained + dead_lettered == position
    written = dead_letter_origins(broker, dead)
    assert len(written) == len(set(written)) == BAD
