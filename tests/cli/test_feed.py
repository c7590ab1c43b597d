"""`streamlearn feed`: which cluster it writes to, and at which rate. Sending is tested with a broker in end_to_end."""

import threading
from pathlib import Path

import pytest

from streamlearn.cli.feed import Pacer, cluster_of
from streamlearn.errors import UsageError
from tests.connectors.kafka.doubles import SteppingClock


def write(folder: Path, source: str) -> Path:
    config = folder / "config.yaml"
    config.write_text(f"source: {source}\n")
    return config


def test_the_cluster_is_that_of_the_configuration(tmp_path: Path) -> None:
    config = write(
        tmp_path, "{kafka: {bootstrap.servers: 'localhost:9092', topics: [t], security.protocol: PLAINTEXT}}"
    )
    assert cluster_of(config, None).bootstrap_servers == "localhost:9092"


def test_a_local_broker_needs_no_configuration() -> None:
    cluster = cluster_of(None, "127.0.0.1:9092")
    assert (cluster.bootstrap_servers, cluster.security_protocol) == ("127.0.0.1:9092", "PLAINTEXT")


def test_a_broker_on_another_machine_needs_a_configuration() -> None:
    """The message says so; it is not a traceback of pydantic."""
    with pytest.raises(UsageError, match=r"brokers on this machine.*found broker\.example:9092; use --config"):
        cluster_of(None, "broker.example:9092")


def test_exactly_one_cluster_is_required(tmp_path: Path) -> None:
    config = write(tmp_path, "{jsonl: {path: a.jsonl}}")
    with pytest.raises(UsageError, match="add --config FILE or --bootstrap-servers HOST:PORT"):
        cluster_of(None, None)
    with pytest.raises(UsageError, match="keep one"):
        cluster_of(config, "localhost:9092")
    with pytest.raises(UsageError, match=r"has no source\.kafka"):
        cluster_of(config, None)


def due_times(rate: float | None, number: int, pause_after: int = -1, pause_s: float = 0.0) -> list[float]:
    clock = SteppingClock()
    pacer = Pacer(rate, threading.Event(), clock=clock, wait=clock.sleep)
    times = []
    for index in range(number):
        assert pacer.wait()
        times.append(round(clock.now, 6))
        clock.now += pause_s if index == pause_after else 0.0
    return times


def test_records_are_due_at_equal_distances() -> None:
    """The first at once."""
    assert due_times(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_short_delay_is_caught_up_with() -> None:
    assert due_times(4.0, 6, pause_after=1, pause_s=0.6) == [0.0, 0.25, 0.85, 0.85, 1.0, 1.25]


def test_no_burst_follows_a_long_delay() -> None:
    """The schedule starts over."""
    assert due_times(4.0, 5, pause_after=1, pause_s=60.0) == [0.0, 0.25, 60.25, 60.5, 60.75]


def test_without_a_rate_nothing_waits() -> None:
    assert due_times(None, 3) == [0.0, 0.0, 0.0]


def test_a_stop_ends_the_wait() -> None:
    """Also one that is under way."""
    stop = threading.Event()
    pacer = Pacer(0.001, stop)
    assert pacer.wait()
    threading.Timer(0.05, stop.set).start()
    assert not pacer.wait()
    assert not Pacer(None, stop).wait()
