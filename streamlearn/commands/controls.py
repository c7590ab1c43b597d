"""Controls from the command line: over HTTP to the running daemon, else on the state folder itself, under its lock."""

from contextlib import closing
from urllib.parse import quote

import orjson

from streamlearn import __version__
from streamlearn.commands.client import request, understood
from streamlearn.controls.audit_log import AuditLog
from streamlearn.controls.control import Control, Pause, Pin, RegimeControl, RenameRegime, Resume, RollBack, Unpin
from streamlearn.controls.control_file import ControlFile
from streamlearn.controls.requester import Requester
from streamlearn.controls.state_controls import StateControls
from streamlearn.errors import StateLockedError, UsageError
from streamlearn.jobs.control_result import control_result
from streamlearn.jobs.results import ControlResult
from streamlearn.settings import Settings
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.store import SnapshotStore


def carry_out(settings: Settings, control: Control) -> ControlResult:
    """Carry out a control; it is durable when this returns.

    Raises:
        UsageError: it is refused, or it needs a running daemon; nothing was changed. Or a daemon of another release
            carried it out, whose answer cannot be read.
        SourceError: a daemon holds the state folder and does not answer over HTTP.
        SnapshotError: it could not be made durable.
    """
    try:
        lock = StateLock(settings.state)
    except StateLockedError as locked:
        if not settings.serve.enabled:
            raise UsageError(f"{locked}; it serves no HTTP (serve.enabled), so it takes no controls") from locked
        return _ask_daemon(settings, control)
    with lock:
        return _change_folder(settings, control)


def _ask_daemon(settings: Settings, control: Control) -> ControlResult:
    path, body = _request_of(control)
    agent = f"streamlearn/{__version__} ({Requester.of_this_process().user})"
    advice = "a process holds the state folder; wait until it serves HTTP"
    answer = request(settings, path, orjson.dumps(body), advice=advice, with_token=True, agent=agent)
    with understood("the daemon"):
        return ControlResult.model_validate_json(answer)


def _request_of(control: Control) -> tuple[str, dict[str, object]]:
    """Path and body of a control."""
    match control:
        case RollBack(name, skip_records):
            return f"/v1/snapshots/{quote(name, safe='')}/rollback", {"skip_records": skip_records}
        case Pin(name) | Unpin(name):
            return f"/v1/snapshots/{quote(name, safe='')}/{control.name}", {}
        case RegimeControl(number):
            body: dict[str, object] = {"name": control.new_name} if isinstance(control, RenameRegime) else {}
            return f"/v1/regimes/{number}/{control.name}", body
    return f"/v1/{control.name}", {}


def _change_folder(settings: Settings, control: Control) -> ControlResult:
    """Carry out a control on a state folder that no daemon uses."""
    file = ControlFile(settings.state)
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep, pins=lambda: file.state.pins)
    with closing(Journal(settings.state / "journal.jsonl")) as journal:
        controls = StateControls(file, store, journal)
        moved: list[str] = []
        controls.finish_rollback()
        with AuditLog(settings.state).carrying_out(control, Requester.of_this_process()) as outcome:
            outcome.unchanged = not _apply(controls, control, moved)
        newest = next(reversed(store.names()), None)
        return control_result(control, controls, changed=not outcome.unchanged, moved=moved, newest=newest)


def _apply(controls: StateControls, control: Control, moved: list[str]) -> bool:
    """Return whether anything changed."""
    match control:
        case Pause() | Resume():
            return controls.pause(isinstance(control, Pause))
        case Pin(name):
            return controls.pin(name)
        case Unpin(name):
            return controls.unpin(name)
        case RollBack(name, skip_records):
            _, skipped = controls.check_rollback(name, skip_records)
            moved += controls.roll_back(name, skipped)
            return True
    raise UsageError(f"{control.name} changes what a daemon has learned: start the daemon first; it may be paused")
