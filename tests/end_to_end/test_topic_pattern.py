"""Topics by pattern: one that is created while the daemon runs is learned from its first record, exactly once."""

import json
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.doubles import tiny_backbone
from tests.end_to_end.process import DaemonProcess, ForkedDaemon, configuration

RECORDS = 60


def rows(topic: str) -> list[bytes]:
    return [
        json.dumps({"prompt": f"{topic} {number}?", "completion": f"{number}"}).encode() for number in range(RECORDS)
    ]


@pytest.mark.broker
def test_a_topic_created_later_is_learned_exactly_once_over_a_sigkill(
    broker: Broker, tmp_path: Path, daemons: list[DaemonProcess]
) -> None:
    """Killed when some of the new topic's records are trained; a third topic is created while the daemon is down."""
    first, dead = broker.new_topic(), broker.new_topic()
    later, last = f"{first}-later", f"{first}-last"
    config = configuration(broker, first, dead, tiny_backbone(tmp_path), 4)
    del config["source"]["kafka"]["topics"]
    config["source"]["kafka"] |= {
        "topics.pattern": f"{first}(-.*)?",
        "metadata.max.age.ms": 200,
        "offset.start": "latest",
    }
    config["stream"]["linger_s"] = 1.0
    config["snapshot"] = {"every_records": 24, "every_s": 1.0}
    daemon = ForkedDaemon(tmp_path / "run", config)
    daemons.append(daemon)

    daemon.start()
    daemon.wait_until(lambda: daemon.has_snapshot, "the first snapshot")
    broker.produce(first, rows(first))
    broker.create_topic(later)
    broker.produce(later, rows(later))
    daemon.wait_until(lambda: later in str(daemon.last_journalled()), "a step of the new topic")
    daemon.kill()
    broker.create_topic(last)
    broker.produce(last, rows(last))
    daemon.start()
    group, ends = config["source"]["kafka"]["group.id"], {(topic, 0): RECORDS for topic in (first, later, last)}
    daemon.wait_until(lambda: {at: stored[0] for at, stored in broker.committed(group).items()} == ends, "the end")
    assert daemon.terminate() == 0

    ledger = {row[0]: sum(row[2:]) for row in daemon.newest().manifest["ledger"]}
    assert ledger == dict.fromkeys((first, later, last), RECORDS)
    assert broker.read_all(dead) == []
