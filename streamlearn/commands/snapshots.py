"""The snapshots commands: list, show and verify the snapshots of a state folder."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from streamlearn.commands.options import ConfigOption, err, load_settings, out
from streamlearn.errors import StreamlearnError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from streamlearn.snapshot.snapshot import SnapshotInfo
    from streamlearn.snapshot.store import SnapshotStore

app = typer.Typer(
    help="List, show and verify snapshots. Safe while a daemon is running.",
    no_args_is_help=True,
)


@app.command("list")
def list_snapshots(config: ConfigOption) -> None:
    """List the snapshots, newest last."""
    out.print(table(_store(config).infos()))


@app.command("show")
def show_snapshot(
    config: ConfigOption,
    name: Annotated[str, typer.Argument(help="Name of the snapshot, for example 00000042.")],
) -> None:
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


def table(infos: "list[SnapshotInfo]") -> "RenderableType":
    """One row per snapshot."""
    from streamlearn.commands.fitted_table import FittedColumn, FittedTable  # noqa: PLC0415 - not needed for --help

    if not infos:
        return "no snapshots yet"
    return FittedTable(
        [
            FittedColumn("snapshot", [info.name for info in infos], 9, is_text=True),
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
