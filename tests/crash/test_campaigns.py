"""Short crash campaigns: kills, stops, calls, states, mutations, and records that crash the process."""

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest

from streamlearn.daemon.checkpoint import RunState
from streamlearn.errors import Reason
from streamlearn.snapshot.crash_guard import CrashGuard
from streamlearn.snapshot.store import SnapshotStore
from tests.broker import Broker, FileTopics
from tests.crash.calls import REPLACE, SAVE, CannotTraceError, kill_at_calls
from tests.crash.harness import Harness
from tests.crash.killers import MAGIC, MAGIC_TOKEN
from tests.crash.mutations import MUTATIONS, SnapshotPair, mutate
from tests.crash.states import load_states
from tests.doubles import tiny_backbone
from tests.end_to_end.process import ForkedDaemon
from tests.variants import variants


def test_a_kill_at_an_fsync_or_a_rename_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """Bit for bit, and the next save works."""
    try:
        tally = kill_at_calls(tmp_path, (SAVE, REPLACE), ("fsync", "rename"))
    except CannotTraceError as error:
        pytest.skip(str(error))
    assert tally.clean, tally
    assert tally.kills["fsync"] >= 12, tally
    assert tally.loaded["old"] >= 10, tally
    assert tally.loaded["new"] >= 2, tally


GOOD = 21
CRASHING = {
    "decoding": {"prompt": MAGIC.decode(), "completion": " no"},
    "training": {"input_ids": [9, MAGIC_TOKEN, 9, 8]},
}


@pytest.mark.parametrize("where", variants(CRASHING.keys(), short=["training"]))
def test_a_record_that_crashes_the_process_is_dead_lettered_after_three_crashes(tmp_path: Path, where: str) -> None:
    """Three processes end with the same signal; the fourth learns all other records and writes one dead letter."""
    rows: list[Any] = [{"prompt": f"say {i}", "completion": f" {i * i}"} for i in range(GOOD)]
    rows.insert(13, CRASHING[where])
    (tmp_path / "backbone").mkdir()
    (tmp_path / "stream.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    config = {
        "state": str(tmp_path / "state"),
        "source": {"jsonl": {"path": str(tmp_path / "stream.jsonl")}},
        "stream": {"max_tokens": 32, "batch_tokens": 128, "batch_records": 4},
        "backbone": {"model": str(tiny_backbone(tmp_path / "backbone")), "dtype": "float32"},
        "adapter": {"num_heads": 4},
        "holdout": {"every_records": 0},
        "snapshot": {"every_records": 8},
    }
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.killers", str(tmp_path / "config.json"), where],
        capture_output=True,
        check=True,
        timeout=300,
    )
    assert orjson.loads(done.stdout) == [-signal.SIGABRT] * 3 + [0], done.stderr.decode()[-3000:]
    newest = SnapshotStore(tmp_path / "state" / "snapshots", keep=9).newest()
    assert newest is not None
    assert [row[2:] for row in newest.manifest.ledger] == [(GOOD, 1, 0, 0)]
    assert newest.component("run", RunState).reasons == {Reason.KILLED_PROCESS: 1}
    with closing(CrashGuard(tmp_path / "state")) as guard:
        assert guard.given_up == frozenset()


KILLS, STOPS = 3, 2

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def harness(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    backbone = tiny_backbone(tmp_path_factory.mktemp("backbone"))
    return Harness(broker, backbone, tmp_path_factory.mktemp("runs"), seed=5, process=ForkedDaemon)


def test_kills_at_random_moments_lose_repeat_and_change_nothing(harness: Harness) -> None:
    """During starts, steps and snapshots."""
    tally = harness.kill(KILLS)
    assert tally.kills.total() == KILLS
    assert tally.same, tally


@pytest.mark.long
def test_kills_of_daemons_that_read_a_file_lose_nothing_either(tmp_path: Path) -> None:
    """The campaign of machines without Kafka."""
    for name in ("backbone", "topics"):
        (tmp_path / name).mkdir()
    topics, backbone = FileTopics(tmp_path / "topics"), tiny_backbone(tmp_path / "backbone")
    tally = Harness(topics, backbone, tmp_path, seed=5, process=ForkedDaemon).kill(1)
    assert tally.kills.total() == 1
    assert tally.same, tally


def test_stops_at_random_moments_are_clean_and_nothing_is_repeated(harness: Harness) -> None:
    """The exit code is 0, and the last snapshot covers every journalled batch."""
    tally = harness.stop(STOPS)
    assert tally.stops.by_moment.total() == STOPS
    assert not tally.stops.bad_exits, tally
    assert not tally.stops.replayed, tally
    assert tally.same, tally


def test_every_mutation_of_the_newest_snapshot_is_detected(tmp_path: Path) -> None:
    """The older snapshot is returned bit for bit."""
    tally = mutate(11 * len(MUTATIONS), 3, tmp_path)
    assert tally.clean, tally
    assert len(tally.by_kind) == len(MUTATIONS)


def test_an_unchanged_snapshot_counts_as_undetected(tmp_path: Path) -> None:
    """The check itself works."""
    pair = SnapshotPair(tmp_path, 1024)
    _, undetected, wrong = pair.fall_back(pair.new)
    assert undetected == "found 00000002"
    assert wrong is None


def test_every_crash_state_of_a_random_history_holds_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    """Its journal consists of the first lines of one that was written."""
    figures, clean = load_states(100, seed=7, folder=tmp_path)
    assert clean, figures
    assert figures["states"] == 100
