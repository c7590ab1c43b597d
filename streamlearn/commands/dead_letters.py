"""The dead-letters commands: list, show and export what was set aside, and put it back."""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from streamlearn.commands.options import ConfigOption, JsonOption, err, load_settings, out
from streamlearn.errors import UsageError

if TYPE_CHECKING:
    from connectors.stored_dead_letter import StoredDeadLetter
    from streamlearn.commands.dead_letter_replay import ReplayReport
    from streamlearn.commands.dead_letter_selection import DeadLetterSelection

app = typer.Typer(
    help="List, show, export and put back records that were set aside. Safe while a daemon is running.",
    no_args_is_help=True,
)

ReasonOption = Annotated[
    list[str] | None, typer.Option("--reason", help="Only this reason; may be repeated.", metavar="REASON")
]
TopicOption = Annotated[str | None, typer.Option("--topic", help="Only records of this topic.", metavar="NAME")]
PartitionOption = Annotated[int | None, typer.Option("--partition", help="Only records of this partition.", min=0)]
_WHERE = "TOPIC:PARTITION:OFFSET"


@app.command("list")
def list_dead_letters(
    config: ConfigOption,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    partition: PartitionOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number to list: the newest.", min=1)] = 50,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest last, without their content.

    --json prints one object per dead letter.
    """
    from connectors.open import read_dead_letters  # noqa: PLC0415 - not needed for --help
    from streamlearn.commands import dead_letter_views as views  # noqa: PLC0415

    selection = _selection((), reason, topic, partition)
    newest: deque[StoredDeadLetter] = deque(maxlen=limit)
    total = 0
    for dead_letter in selection.select(read_dead_letters(load_settings(config))):
        newest.append(dead_letter)
        total += 1
    if as_json:
        for each in newest:
            _print_json(views.row(each))
    else:
        out.print(views.table(list(newest), total))


@app.command()
def show(
    where: Annotated[str, typer.Argument(help="The record, as `dead-letters list` shows it.", metavar=_WHERE)],
    config: ConfigOption,
    content: Annotated[bool, typer.Option("--content", help="Also show key, headers and value.")] = False,
) -> None:
    """Show one dead letter as JSON: where, why, and the sizes of its content."""
    from connectors.open import read_dead_letters  # noqa: PLC0415 - not needed for --help
    from streamlearn.commands import dead_letter_views as views  # noqa: PLC0415

    found = list(_selection((where,)).select(read_dead_letters(load_settings(config))))
    if not found:
        raise UsageError(f"{where} is not among the dead letters: `streamlearn dead-letters list` lists them")
    for each in found:  # a topic that was created again has the same offsets again
        _print_json(views.details(each, content=content), indent=True)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="New file to write (JSONL).", dir_okay=False)],
    config: ConfigOption,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    partition: PartitionOption = None,
) -> None:
    """Write dead letters with their content to a file, to be mended and replayed.

    Change `value` in each line; remove lines that should stay dead letters.
    """
    from connectors.open import read_dead_letters  # noqa: PLC0415 - not needed for --help
    from streamlearn.commands import dead_letter_export  # noqa: PLC0415

    settings = load_settings(config)
    selected = _selection((), reason, topic, partition).select(read_dead_letters(settings))
    number = dead_letter_export.write(file, selected, settings.stream)
    _say(f"{number} dead letters written to {file}: mend each `value`, then `dead-letters replay --from {file}`")


@app.command()
def replay(
    config: ConfigOption,
    where: Annotated[
        list[str] | None, typer.Argument(help="Records to put back as they are.", metavar=f"[{_WHERE}]...")
    ] = None,
    mended: Annotated[
        Path | None,
        typer.Option("--from", help="Put back the values in this exported file.", exists=True, dir_okay=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Put back all dead letters as they are.")] = False,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    partition: PartitionOption = None,
    again: Annotated[bool, typer.Option("--again", help="Also those that were put back before.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be put back; change nothing.")] = False,
) -> None:
    """Put dead letters back at the end of the stream, each once, also across repeated calls and kill -9.

    With --from, nothing is put back if a value would be refused again. Otherwise such records are left out and counted.
    """
    selection = _selection(where or (), reason, topic, partition)
    if sum((mended is not None, every, not selection.is_everything)) != 1:
        raise UsageError("expected one of --from FILE, --all, and records or filters such as --reason")
    from streamlearn.commands.dead_letter_session import ReplaySession  # noqa: PLC0415 - not needed for --help

    session = ReplaySession(load_settings(config), again=again, dry_run=dry_run)
    with err.status("replaying") as line:

        def progress(so_far: "ReplayReport") -> None:
            line.update(f"{so_far.put_back} put back")

        found = session.mended(mended, progress) if mended is not None else session.selected(selection, progress)
    verb = "would be put back" if dry_run else "put back"
    _say(f"{found.put_back} {verb}, {found.already} had been before")
    if found.of_other_streams:
        _say(f"{found.of_other_streams} left: records of topics that this configuration does not read")
    if found.left_out:
        _say(
            f"{found.left_out} left: without content, which was too large for the dead-letter topic; read it at the "
            "record's own topic, partition and offset, and put it back with `dead-letters export` and --from"
        )
    for name, number in found.unusable.most_common():
        _say(f"{number} left: would be dead letters again ({name}); mend them with `dead-letters export`")


def _selection(
    where: "tuple[str, ...] | list[str]" = (),
    reason: list[str] | None = None,
    topic: str | None = None,
    partition: int | None = None,
) -> "DeadLetterSelection":
    from streamlearn.commands.dead_letter_selection import DeadLetterSelection  # noqa: PLC0415 - not needed for --help

    return DeadLetterSelection.of(where, reason or (), topic, partition)


def _print_json(value: dict[str, object], *, indent: bool = False) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else 0).decode())  # noqa: T201


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
