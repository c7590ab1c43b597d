"""Commands that control a run: over HTTP to the running daemon, otherwise on the state folder, under its lock."""

from collections.abc import Callable, Collection
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from streamlearn import __version__
from streamlearn.cli.options import ConfigOption, JsonOption, err, load_settings, out, positive
from streamlearn.controls import VERBS, AuditLog, Control, ControlFile, Requester, Scope, StateControls
from streamlearn.controls import read as read_controls
from streamlearn.errors import StateLockedError, StreamlearnError, UsageError

if TYPE_CHECKING:  # commands are imported for --help too
    from rich.console import RenderableType

    from streamlearn.jobs.queue import ControlResult
    from streamlearn.settings import Settings
    from streamlearn.snapshot.parts import SnapshotInfo
    from streamlearn.snapshot.store import SnapshotStore


def request_control(settings: "Settings", control: Control) -> "ControlResult":
    """Apply a control; it is durable when this returns.

    Raises:
        UsageError: it is refused, or it needs a running daemon; nothing was changed. Or a daemon of another release
            applied it, and its response cannot be read.
        SourceError: a daemon holds the state folder and does not answer over HTTP.
        SnapshotError: it could not be made durable.
    """
    from streamlearn.snapshot.files import StateLock  # noqa: PLC0415

    try:
        lock = StateLock(settings.state)
    except StateLockedError as locked:
        if not settings.serve.enabled:
            raise UsageError(f"{locked}; it serves no HTTP (serve.enabled), so it takes no controls") from locked
        return _request_daemon(settings, control)
    with lock:
        return _change_folder(settings, control)


def _request_daemon(settings: "Settings", control: Control) -> "ControlResult":
    from streamlearn.cli.client import checked_response, request  # noqa: PLC0415
    from streamlearn.jobs.queue import ControlResult  # noqa: PLC0415

    agent = f"streamlearn/{__version__} ({Requester.from_process().user})"
    advice = "a process holds the state folder; wait until it serves HTTP"
    body = orjson.dumps(control.body)
    response = request(settings, control.path, body, advice=advice, with_token=True, agent=agent)
    with checked_response("the daemon"):
        return ControlResult.model_validate_json(response)


def _change_folder(settings: "Settings", control: Control) -> "ControlResult":
    """Apply a control to a state folder that no daemon uses."""
    from streamlearn.jobs.runner import control_result  # noqa: PLC0415
    from streamlearn.snapshot.journal import Journal  # noqa: PLC0415
    from streamlearn.snapshot.store import SnapshotStore  # noqa: PLC0415

    file = ControlFile(settings.state)
    store = SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep, pins=lambda: file.state.pins)
    with closing(Journal(settings.state / "journal.jsonl")) as journal:
        controls = StateControls(file, store, journal)
        moved: list[str] = []
        controls.finish_rollback()
        with AuditLog(settings.state).applying(control, Requester.from_process()) as outcome:
            if control.verb == "rollback":
                _, skipped = controls.check_rollback(control.arguments["snapshot"], control.arguments["skip_records"])
                moved += controls.roll_back(control.arguments["snapshot"], skipped)
            else:
                outcome.unchanged = not controls.apply(control)
        newest = next(reversed(store.names()), None)
        return control_result(control, controls, changed=not outcome.unchanged, moved=moved, newest=newest)


regimes = typer.Typer(
    help="List the regimes of the running daemon, and change them. Every change is durable and in the audit log.",
    no_args_is_help=True,
)
snapshots = typer.Typer(
    help="List, show, verify, pin and unpin snapshots, and roll back to one. Safe while a daemon is running.",
    no_args_is_help=True,
)

NumberArgument = Annotated[
    int, typer.Argument(help="Number of the regime, as in `regimes list`.", metavar="N", parser=positive)
]
NameArgument = Annotated[str, typer.Argument(help="Name of the snapshot, for example 00000042.", metavar="NAME")]


def _apply(config: Path, control: Control) -> "ControlResult":
    result = request_control(load_settings(config), control)
    done = VERBS[control.verb].done.format(**control.arguments)
    if control.scope is Scope.REGIME:
        done += f"; snapshot {result.snapshot} holds it"
    _print(done if result.changed else f"unchanged, already so: {done}")
    return result


def _print(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def add_controls(app: typer.Typer) -> None:
    """Add a command for each verb: controls of the run to `app`, the others to their groups."""
    groups = {Scope.RUN: app, Scope.SNAPSHOT: snapshots, Scope.REGIME: regimes}
    for verb in VERBS.values():
        groups[verb.scope].command(verb.name, help=verb.help)(_COMMANDS.get(verb.name) or _command(verb.name))


def _command(verb: str) -> Callable[..., None]:
    """The command of a control without further arguments."""

    def of_run(config: ConfigOption) -> None:
        _apply(config, Control.run(verb))

    def of_snapshot(name: NameArgument, config: ConfigOption) -> None:
        _apply(config, Control.snapshot(verb, name))

    def of_regime(number: NumberArgument, config: ConfigOption) -> None:
        _apply(config, Control.regime(verb, number))

    commands: dict[Scope, Callable[..., None]] = {
        Scope.RUN: of_run,
        Scope.SNAPSHOT: of_snapshot,
        Scope.REGIME: of_regime,
    }
    return commands[VERBS[verb].scope]


def _rename(
    number: NumberArgument,
    name: Annotated[str, typer.Argument(help="The new name.", metavar="NAME")],
    config: ConfigOption,
) -> None:
    _apply(config, Control.regime("rename", number, new_name=name))


def _rollback(
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
    result = _apply(config, Control.snapshot("rollback", name, skip_records=tuple(skip_records or ())))
    _print(f"newer snapshots that were moved aside (rolled-back-*): {', '.join(result.moved_aside) or 'none'}")
    if result.skipped_records:
        _print(f"records that are never trained on: {', '.join(result.skipped_records)}")


_COMMANDS: dict[str, Callable[..., None]] = {"rename": _rename, "rollback": _rollback}


@regimes.command("list")
def list_regimes(config: ConfigOption, as_json: JsonOption = False) -> None:
    """List the remembered regimes and how much of each is forgotten."""
    from streamlearn.cli import status  # noqa: PLC0415 - not needed for --help

    response = status.fetch(load_settings(config), "regimes")
    if as_json:
        print(orjson.dumps(response["regimes"], option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    else:
        out.print(status.regimes_table(response["regimes"]))


@snapshots.command("list")
def list_snapshots(config: ConfigOption) -> None:
    """List the snapshots, newest last."""
    out.print(snapshot_table(_store(config).infos(), read_controls(load_settings(config).state).pins))


@snapshots.command("show")
def show_snapshot(config: ConfigOption, name: NameArgument) -> None:
    """Verify a snapshot and print its manifest as JSON."""
    print(_store(config).load(name).manifest.model_dump_json(indent=2, by_alias=True))  # noqa: T201


@snapshots.command("verify")
def verify_snapshots(
    config: ConfigOption,
    name: Annotated[str | None, typer.Argument(help="Name of the snapshot. All of them if absent.")] = None,
) -> None:
    """Compare every file of a snapshot with its manifest.

    Exits 74 if one is damaged.
    """
    store = _store(config)
    failure: StreamlearnError | None = None
    for snapshot in [name] if name else store.names():
        try:
            store.verify(snapshot)
        except StreamlearnError as error:
            err.print(f"{snapshot}  damaged: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            failure = error
        else:
            out.print(f"{snapshot}  intact", markup=False, highlight=False)
    if failure:
        raise typer.Exit(failure.exit_code)


def snapshot_table(infos: "list[SnapshotInfo]", pins: Collection[str] = ()) -> "RenderableType":
    from streamlearn.cli.options import Cell, render_table  # noqa: PLC0415 - not needed for --help

    if not infos:
        return "no snapshots yet"
    columns: dict[str, Cell[SnapshotInfo]] = {
        "snapshot": lambda info: info.name,
        "pinned": lambda info: "pinned" if info.name in pins else "",
        "written (UTC)": lambda info: _seconds(info.created_at),
        "bytes": lambda info: f"{info.bytes:,}",
        "position": lambda info: str(info.position),
    }
    shown = {heading: cell for heading, cell in columns.items() if any(map(cell, infos))}
    return render_table(infos, shown, text=("snapshot", "pinned", "written (UTC)", "position"))


def _seconds(created_at: str) -> str:
    """An ISO 8601 time, to the second.

    >>> _seconds("2026-01-31T12:34:56.789+00:00")
    '2026-01-31 12:34:56'
    """
    return f"{datetime.fromisoformat(created_at):%Y-%m-%d %H:%M:%S}"


def _store(config: Path) -> "SnapshotStore":
    from streamlearn.snapshot.store import SnapshotStore  # noqa: PLC0415

    settings = load_settings(config)
    return SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)
