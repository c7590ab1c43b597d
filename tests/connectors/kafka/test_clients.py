"""Waiting for a broker."""

import socket

import pytest
from structlog.testing import capture_logs

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
