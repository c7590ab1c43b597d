"""Controls from the command line: over HTTP to the running daemon, else on the state folder itself, under its lock."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import orjson
import typer

from streamlearn import __version__
from streamlearn.cli.client import request, understood
from streamlearn.cli.options import ConfigOption, JsonOption, load_settings, out
from streamlearn.controls import (
    AuditLog,
    Control,
    ControlFile,
    Pause,
    Pin,
    RegimeControl,
    RenameRegime,
    Requester,
    Resume,
    RollBack,
    StateControls,
    Unpin,
)
from streamlearn.errors import StateLockedError, UsageError
from streamlearn.jobs.queue import ControlResult
from streamlearn.jobs.runner import control_result
from streamlearn.settings import Settings
from streamlearn.snapshot.journal import Journal
from streamlearn.snapshot.lock import StateLock
from streamlearn.snapshot.store import SnapshotStore

if TYPE_CHECKING:
    from streamlearn.controls import Control
from collections.abc import Collection
from datetime import datetime
from typing import TYPE_CHECKING

from streamlearn.cli.options import err
from streamlearn.errors import StreamlearnError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from streamlearn.controls import Control
    from streamlearn.jobs.queue import ControlResult
    from streamlearn.snapshot.parts import SnapshotInfo
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


app = typer.Typer(
    help="List the regimes of the running daemon, and change them. Every change is durable and in the audit log.",
    no_args_is_help=True,
)
NumberArgument = Annotated[int, typer.Argument(help="Number of the regime, as in `regimes list`.", metavar="N", min=1)]


@app.command("list")
def list_regimes(config: ConfigOption, as_json: JsonOption = False) -> None:
    """List the remembered regimes and what is forgotten of them."""
    from streamlearn.cli import status  # noqa: PLC0415 - not needed for --help

    answer = status.fetch_regimes(load_settings(config))
    if as_json:
        print(orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    else:
        out.print(status.regimes_table(answer))


@app.command()
def freeze(number: NumberArgument, config: ConfigOption) -> None:
    """Train no more on a regime's records. It still answers."""
    from streamlearn.controls import FreezeRegime  # noqa: PLC0415

    _change(config, FreezeRegime(number), f"regime {number} is frozen")


@app.command()
def unfreeze(number: NumberArgument, config: ConfigOption) -> None:
    """Train on a regime's records again."""
    from streamlearn.controls import UnfreezeRegime  # noqa: PLC0415

    _change(config, UnfreezeRegime(number), f"regime {number} is trained on again")


@app.command()
def rename(
    number: NumberArgument,
    name: Annotated[str, typer.Argument(help="The new name.", metavar="NAME")],
    config: ConfigOption,
) -> None:
    """Give a regime a name."""
    from streamlearn.controls import RenameRegime  # noqa: PLC0415

    _change(config, RenameRegime(number, name), f"regime {number} is named {name}")


@app.command()
def approve(number: NumberArgument, config: ConfigOption) -> None:
    """Publish what a regime learned although its answers changed."""
    from streamlearn.controls import ApproveRegime  # noqa: PLC0415

    _change(config, ApproveRegime(number), f"regime {number} is published if it is no worse than the backbone")


@app.command()
def drop(number: NumberArgument, config: ConfigOption) -> None:
    """Forget a regime and its adapter. Snapshots written before keep it."""
    from streamlearn.controls import DropRegime  # noqa: PLC0415

    _change(config, DropRegime(number), f"regime {number} is forgotten")


def _change(config: Path, control: "Control", done: str) -> None:

    result = carry_out(load_settings(config), control)
    out.print(f"{done}; snapshot {result.snapshot} holds it", markup=False, highlight=False, soft_wrap=True)


app_snapshots = typer.Typer(
    help="List, show, verify, pin and unpin snapshots, and roll back to one. Safe while a daemon is running.",
    no_args_is_help=True,
)


NameArgument = Annotated[str, typer.Argument(help="Name of the snapshot, for example 00000042.", metavar="NAME")]


@app_snapshots.command("list")
def list_snapshots(config: ConfigOption) -> None:
    """List the snapshots, newest last."""
    from streamlearn import controls as control_file  # noqa: PLC0415 - not needed for --help

    out.print(table(_store(config).infos(), control_file.read(load_settings(config).state).pins))


@app_snapshots.command("show")
def show_snapshot(config: ConfigOption, name: NameArgument) -> None:
    """Verify a snapshot and print its manifest as JSON."""
    print(_store(config).load(name).manifest.model_dump_json(indent=2, by_alias=True))  # noqa: T201


@app_snapshots.command("verify")
def verify_snapshots(
    config: ConfigOption,
    name: Annotated[str | None, typer.Argument(help="Name of the snapshot. All of them if absent.")] = None,
) -> None:
    """Compare every file of a snapshot with its manifest.

    Exits 74 if one is damaged.
    """
    store = _store(config)
    failure: StreamlearnError | None = None
    for each in [name] if name else store.names():
        try:
            store.verify(each)
        except StreamlearnError as error:
            err.print(f"{each}  damaged: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            failure = error
        else:
            out.print(f"{each}  intact", markup=False, highlight=False)
    if failure:
        raise typer.Exit(failure.exit_code)


@app_snapshots.command()
def pin(name: NameArgument, config: ConfigOption) -> None:
    """Never prune a snapshot."""
    from streamlearn.controls import Pin  # noqa: PLC0415

    result = _carry_out(config, Pin(name))
    _say(f"{name} is pinned{'' if result.changed else ' already'}: it is never pruned")


@app_snapshots.command()
def unpin(name: NameArgument, config: ConfigOption) -> None:
    """Let a snapshot be pruned again."""
    from streamlearn.controls import Unpin  # noqa: PLC0415

    _carry_out(config, Unpin(name))
    _say(f"{name} is not pinned: it is pruned once snapshot.keep newer ones exist")


@app_snapshots.command()
def rollback(
    name: NameArgument,
    config: ConfigOption,
    skip_records: Annotated[
        list[str] | None,
        typer.Option(
            help="Offsets that are never trained on, as TOPIC:PARTITION:FROM..TO with both ends included, or FROM..TO "
            "where the stream has one partition. May be repeated.",
            metavar="OFFSETS",
        ),
    ] = None,
) -> None:
    """Go on from an earlier snapshot, as if the run had stopped there.

    Newer snapshots are moved aside and kept. Skipped records become dead letters when they are read again.
    """
    from streamlearn.controls import RollBack  # noqa: PLC0415

    result = _carry_out(config, RollBack(name, tuple(skip_records or ())))
    moved = ", ".join(result.moved_aside) or "none"
    _say(f"rolled back to {name}; newer snapshots that were moved aside (rolled-back-*): {moved}")
    if result.skipped_records:
        _say(f"records that are never trained on: {', '.join(result.skipped_records)}")


def _carry_out(config: "Path", control: "Control") -> "ControlResult":

    return carry_out(load_settings(config), control)


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def table(infos: "list[SnapshotInfo]", pins: Collection[str] = ()) -> "RenderableType":
    """One row per snapshot."""
    from streamlearn.cli.status import FittedColumn, FittedTable  # noqa: PLC0415 - not needed for --help

    if not infos:
        return "no snapshots yet"
    pinned = [FittedColumn("pinned", ["pinned" if info.name in pins else "" for info in infos], 8, is_text=True)]
    return FittedTable(
        [
            FittedColumn("snapshot", [info.name for info in infos], 9, is_text=True),
            *(pinned if any(info.name in pins for info in infos) else ()),
            FittedColumn("written (UTC)", [_seconds(info.created_at) for info in infos], 2, is_text=True),
            FittedColumn("bytes", [f"{info.bytes:,}" for info in infos], 1),
            FittedColumn("position", [str(info.position) for info in infos], 9, is_text=True),
        ]
    )


def _seconds(created_at: str) -> str:
    """An ISO 8601 time, to the second.

    >>> _seconds("2026-01-31T12:34:56.789+00:00")
    '2026-01-31 12:34:56'
    """
    return f"{datetime.fromisoformat(created_at):%Y-%m-%d %H:%M:%S}"


def _store(config: "Path") -> "SnapshotStore":
    from streamlearn.snapshot.store import SnapshotStore  # noqa: PLC0415

    settings = load_settings(config)
    return SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
