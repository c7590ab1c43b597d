"""Waiting for a broker, and clients that find none."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from connectors.kafka.clients import new_admin, new_consumer, new_producer
from connectors.kafka.source import KafkaSource
from streamlearn.errors import SourceError
from streamlearn.events import Event
from streamlearn.stream.record import Position
from tests.connectors.kafka.kit import SteppingClock, settings


def test_no_broker_at_the_start_is_logged_once_and_then_fatal() -> None:
    """The source retries with growing pauses, then raises an error with the address."""
    clock = SteppingClock()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        servers = f"127.0.0.1:{free.getsockname()[1]}"
        source = KafkaSource(settings(bootstrap_servers=servers), start_timeout_s=9.0, clock=clock, sleep=clock.sleep)
        with (
            capture_logs() as logs,
            pytest.raises(SourceError, match=f"broker must be reachable at {servers}, none accepted"),
        ):
            source.seek(Position())
    assert [entry["event"] for entry in logs] == [Event.SOURCE_UNREACHABLE]
    assert clock.pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    source.close()


@pytest.mark.parametrize("build", [new_consumer, new_producer, new_admin])
def test_a_client_that_finds_no_kafka_leaves_nothing_behind(build: Callable[..., Any]) -> None:
    """Its peer accepts connections and never answers, as a load balancer without brokers does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"127.0.0.1:{silent.getsockname()[1]}"
        before = (*threading.enumerate(), *descriptors())
        with pytest.raises(SourceError, match=f"{servers} accepts TCP connections but no PLAINTEXT connection"):
            build(settings(bootstrap_servers=servers), 0.2)
        assert {*threading.enumerate(), *descriptors()} <= {*before}, "what earlier tests left may go meanwhile"


def descriptors() -> set[str]:
    """What the process's descriptors are open on; a socket has a number that no later one gets."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or closed meanwhile
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def test_a_consumer_is_not_rebuilt_at_every_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the cluster accepts connections and does not answer, the pauses between attempts grow to ten seconds."""
    clock = SteppingClock()
    attempts: list[float] = []

    def fail(*_: Any) -> None:
        attempts.append(clock.now)
        raise SourceError("no answer")

    monkeypatch.setattr("connectors.kafka.source.new_consumer", fail)
    monkeypatch.setattr("connectors.kafka.source.is_reachable", lambda _: True)
    source = KafkaSource(settings(), clock=clock, sleep=clock.sleep)
    while clock.now < 60.0:
        assert source.poll(max_records=8, timeout_s=0.25) == ()
    assert attempts == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 25.5, 35.5, 45.5, 55.5]
    source.close()
