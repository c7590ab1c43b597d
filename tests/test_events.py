"""Log lines: one JSON object each in the style `json`, and no local variables in tracebacks."""

import io
from contextlib import suppress
from types import MappingProxyType

import orjson
import pytest

from streamlearn.events import Event, configure_logging, get_logger

VERSIONS = MappingProxyType({"torch": "2"})


def test_an_event_is_one_json_object_per_line() -> None:
    """Name, level, time, component and fields; what orjson cannot serialise is written as text."""
    stream = io.StringIO()
    configure_logging("info", "json", stream)
    get_logger("snapshot").info(Event.SNAPSHOT_WRITTEN, name="00000001", seconds=0.25, origin={1}, versions=VERSIONS)
    get_logger("snapshot").debug(Event.STEP_TAKEN)
    (line,) = stream.getvalue().splitlines()
    event = orjson.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {
        "event": "snapshot_written",
        "level": "info",
        "component": "snapshot",
        "name": "00000001",
        "seconds": 0.25,
        "origin": "{1}",
        "versions": {"torch": "2"},
    }


@pytest.mark.parametrize(
    ("environment", "is_colored"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"NO_COLOR": ""}, True)],
)
def test_colors_are_where_tables_have_them(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, is_colored: bool
) -> None:
    """On a terminal, unless the environment says otherwise."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", **environment}.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    assert not configure_logging("info", "auto", terminal)
    get_logger("snapshot").info(Event.SNAPSHOT_WRITTEN, name="00000001")
    assert ("\x1b[" in terminal.getvalue()) == is_colored


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_line_that_cannot_be_written_is_lost(style: str) -> None:
    """A full disk or a closed pipe under the log ends no training."""
    with open("/dev/full", "w") as full:
        configure_logging("info", style, full)  # type: ignore[arg-type]
        get_logger("daemon").warning(Event.DEGRADATION_STARTED, what="snapshot")
        with suppress(OSError):
            full.close()
    get_logger("daemon").warning(Event.DEGRADATION_STARTED, what="snapshot")


@pytest.mark.parametrize("style", ["json", "console"])
def test_a_traceback_holds_no_local_variable(style: str) -> None:
    """They may hold records and passwords."""
    stream = io.StringIO()
    configure_logging("info", style, stream)  # type: ignore[arg-type]
    canary = "".join(["hunter", "2"])
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("serve").exception(Event.JOB_FAILED)
    assert "broken" in stream.getvalue()
    assert canary not in stream.getvalue()
