"""The snapshots commands: list, show, verify, pin and unpin the snapshots of a state folder, and roll back to one."""

from collections.abc import Collection
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from streamlearn.commands.options import ConfigOption, err, load_settings, out
from streamlearn.errors import StreamlearnError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from streamlearn.controls.control import Control
    from streamlearn.jobs.results import ControlResult
    from streamlearn.snapshot.snapshot import SnapshotInfo
    from streamlearn.snapshot.store import SnapshotStore

app = typer.Typer(
    help="List, show, verify, pin and unpin snapshots, and roll back to one. Safe while a daemon is running.",
    no_args_is_help=True,
)


NameArgument = Annotated[str, typer.Argument(help="Name of the snapshot, for example 00000042.", metavar="NAME")]


@app.command("list")
def list_snapshots(config: ConfigOption) -> None:
    """List the snapshots, newest last."""
    from streamlearn.controls import control_file  # noqa: PLC0415 - not needed for --help

    out.print(table(_store(config).infos(), control_file.read(load_settings(config).state).pins))


@app.command("show")
def show_snapshot(config: ConfigOption, name: NameArgument) -> None:
    """Verify a snapshot and print its manifest as JSON."""
    print(_store(config).load(name).manifest.model_dump_json(indent=2, by_alias=True))  # noqa: T201


@app.command("verify")
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


@app.command()
def pin(name: NameArgument, config: ConfigOption) -> None:
    """Never prune a snapshot."""
    from streamlearn.controls.control import Pin  # noqa: PLC0415

    result = _carry_out(config, Pin(name))
    _say(f"{name} is pinned{'' if result.changed else ' already'}: it is never pruned")


@app.command()
def unpin(name: NameArgument, config: ConfigOption) -> None:
    """Let a snapshot be pruned again."""
    from streamlearn.controls.control import Unpin  # noqa: PLC0415

    _carry_out(config, Unpin(name))
    _say(f"{name} is not pinned: it is pruned once snapshot.keep newer ones exist")


@app.command()
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
    from streamlearn.controls.control import RollBack  # noqa: PLC0415

    result = _carry_out(config, RollBack(name, tuple(skip_records or ())))
    moved = ", ".join(result.moved_aside) or "none"
    _say(f"rolled back to {name}; newer snapshots that were moved aside (rolled-back-*): {moved}")
    if result.skipped_records:
        _say(f"records that are never trained on: {', '.join(result.skipped_records)}")


def _carry_out(config: "Path", control: "Control") -> "ControlResult":
    from streamlearn.commands.controls import carry_out  # noqa: PLC0415

    return carry_out(load_settings(config), control)


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def table(infos: "list[SnapshotInfo]", pins: Collection[str] = ()) -> "RenderableType":
    """One row per snapshot."""
    from streamlearn.commands.fitted_table import FittedColumn, FittedTable  # noqa: PLC0415 - not needed for --help

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
