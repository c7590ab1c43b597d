"""The dead-letters commands: list and show dead letters, and export their records to be fixed and sent again."""

import base64
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import RenderableType

from streamlearn.cli.options import ConfigOption, JsonOption, load_settings, number, out, positive
from streamlearn.errors import Reason, UsageError
from streamlearn.stream.position import RecordId, TopicPartition

if TYPE_CHECKING:
    from streamlearn.stream.source import DeadLetter

app = typer.Typer(
    help="List, show and export dead letters: records that could not be used. Safe while a daemon is running.",
    no_args_is_help=True,
)

ReasonOption = Annotated[
    list[str] | None, typer.Option("--reason", help="Only this reason; may be repeated.", metavar="REASON")
]
TopicOption = Annotated[str | None, typer.Option("--topic", help="Only records of this topic.", metavar="NAME")]
PartitionOption = Annotated[
    int | None,
    typer.Option("--partition", help="Only records of this partition.", metavar="N", parser=number(0, 2**31 - 1)),
]
_WHERE = "TOPIC:PARTITION:OFFSET"


@app.command("list")
def list_dead_letters(
    config: ConfigOption,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    partition: PartitionOption = None,
    limit: Annotated[int, typer.Option(help="Maximum number to list: the newest.", metavar="N", parser=positive)] = 50,
    as_json: JsonOption = False,
) -> None:
    """List dead letters, newest last, without their content.

    --json prints one object per dead letter.
    """
    selection = Selection.from_options(reason, topic, partition)
    newest: deque[DeadLetter] = deque(maxlen=limit)
    total = 0
    for dead_letter in selection.select(_read(config)):
        newest.append(dead_letter)
        total += 1
    if as_json:
        for dead_letter in newest:
            _print_json(row(dead_letter))
    else:
        out.print(table(newest, total))


@app.command()
def show(
    where: Annotated[str, typer.Argument(help="The record, as `dead-letters list` shows it.", metavar=_WHERE)],
    config: ConfigOption,
    content: Annotated[bool, typer.Option("--content", help="Also show key, headers and value.")] = False,
) -> None:
    """Show one dead letter as JSON: record, reason, and the sizes of its content."""
    selection = Selection(record=parse_where(where))
    dead_letters = list(selection.select(_read(config)))
    if not dead_letters:
        raise UsageError(f"{where} is not among the dead letters: `streamlearn dead-letters list` lists them")
    for dead_letter in dead_letters:  # a topic that was deleted and created again repeats its offsets
        _print_json(details(dead_letter, content=content), indent=True)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="New file to write (JSONL).", dir_okay=False)],
    config: ConfigOption,
    reason: ReasonOption = None,
    topic: TopicOption = None,
    partition: PartitionOption = None,
) -> None:
    """Write the original records to a file, one per line, so that `streamlearn feed` can send them again.

    Values are written as they were; fix the lines that need it. Keys and headers are not written. Records that are not
    one line of text are counted by cause and stay dead letters.
    """
    selection = Selection.from_options(reason, topic, partition)
    written, left_out = write_records(file, selection.select(_read(config)))
    _say(
        f"{written} records written to {file}. Fix the lines that need it, then send them with "
        f"`streamlearn feed {file} --topic NAME --config {config}`, which names those that would be refused again, or "
        "append them to the file that the daemon follows"
    )
    for cause, count in left_out.most_common():
        _say(f"{count} NOT written: {cause}; `streamlearn dead-letters show {_WHERE} --content` shows what is stored")


@dataclass(frozen=True)
class Selection:
    """Filters that must all hold; without any, every dead letter is selected."""

    reasons: frozenset[str] = frozenset()
    topic: str | None = None
    partition: int | None = None
    record: RecordId | None = None

    @classmethod
    def from_options(cls, reasons: list[str] | None, topic: str | None, partition: int | None) -> "Selection":
        """Read the options of a command.

        Raises:
            UsageError: a reason does not exist.
        """
        for reason in reasons or ():
            if reason not in list(Reason):
                raise UsageError(f"--reason {reason} is not known: expected one of {', '.join(Reason)}")
        return cls(frozenset(reasons or ()), topic, partition)

    def select(self, dead_letters: "Iterable[DeadLetter]") -> "Iterator[DeadLetter]":
        """Yield the dead letters that pass every filter."""
        return filter(self._selects, dead_letters)

    def _selects(self, dead_letter: "DeadLetter") -> bool:
        origin = dead_letter.record.origin
        return (
            (not self.reasons or dead_letter.reason in self.reasons)
            and self.topic in (None, origin.topic)
            and self.partition in (None, origin.partition)
            and self.record in (None, dead_letter.record.id)
        )


def parse_where(text: str) -> RecordId:
    """Return the record that TOPIC:PARTITION:OFFSET names.

    Raises:
        UsageError: the text has another form.
    """
    try:
        topic, partition, offset = text.rsplit(":", 2)
        return RecordId(TopicPartition(topic, int(partition)), int(offset))
    except ValueError as error:
        raise UsageError(f"expected {_WHERE} as `dead-letters list` shows it, found {text!r}") from error


def write_records(path: Path, dead_letters: "Iterable[DeadLetter]") -> tuple[int, Counter[str]]:
    """Write the values to a new file that only its owner may read.

    Returns the number of lines, and by cause the number of records that cannot be lines of JSONL.

    Raises:
        UsageError: the file exists, or its folder does not.
    """
    written, left_out = 0, Counter[str]()
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for dead_letter in dead_letters:
                line = line_of(dead_letter)
                if isinstance(line, str):
                    left_out[line] += 1
                else:
                    file.write(line + b"\n")
                    written += 1
    except OSError as error:
        raise UsageError(f"{path} must be a new file in an existing folder: {error.strerror}") from error
    return written, left_out


def line_of(dead_letter: "DeadLetter") -> bytes | str:
    """Return the record's value as one line, unchanged, or the reason why it cannot be one.

    JSON that was written on several lines is joined: outside of strings a line break means no more than a space, and
    strings cannot hold one.
    """
    value = dead_letter.record.value
    if dead_letter.left_out_bytes is not None:
        return "the record was too large for the dead-letter topic, which holds no content of it"
    if value is None or not value.strip():
        return "the record has no value"
    try:
        value.decode()
    except UnicodeDecodeError:
        return "the value is not UTF-8 text"
    if b"\n" not in value:
        return value
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return "the value has line breaks and is not JSON"
    return value.replace(b"\r\n", b" ").replace(b"\n", b" ")


def row(dead_letter: "DeadLetter") -> dict[str, Any]:
    """Everything but the content; `left_out` says that the dead-letter topic was too small for it."""
    from connectors.dead_letters import stage_of  # noqa: PLC0415 - not needed for --help

    record = dead_letter.record
    return {
        "where": f"{record.origin.topic}:{record.origin.partition}:{record.offset}",
        "topic": record.origin.topic,
        "partition": record.origin.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "set_aside_at": _time(dead_letter.written_ms),
        "reason": dead_letter.reason,
        "stage": stage_of(dead_letter.reason),
        "message": dead_letter.message,
        "value_bytes": dead_letter.left_out_bytes if record.value is None else len(record.value),
        "left_out": dead_letter.left_out_bytes is not None,
    }


def details(dead_letter: "DeadLetter", *, content: bool) -> dict[str, Any]:
    """One dead letter with the sizes of key, headers and value, or with all three if `content` is set."""
    record = dead_letter.record
    shown = row(dead_letter) | {
        "key_bytes": None if record.key is None else len(record.key),
        "headers": [{"name": name, "bytes": None if value is None else len(value)} for name, value in record.headers],
    }
    if content:
        shown["key"] = readable(record.key)
        shown["headers"] = [{"name": name, "value": readable(value)} for name, value in record.headers]
        shown["value"] = readable(record.value)
    return shown


def table(dead_letters: "Sequence[DeadLetter]", total: int) -> RenderableType:
    from streamlearn.cli.options import Cell, render_table  # noqa: PLC0415 - not needed for --help

    if not dead_letters:
        return "no dead letters"
    older = total - len(dead_letters)
    rows = [row(dead_letter) for dead_letter in dead_letters]
    columns: dict[str, Cell[dict[str, Any]]] = {
        "record": lambda shown: shown["where"],
        "time (UTC)": lambda shown: (shown["set_aside_at"] or _time(shown["timestamp"]) or "-")[:19].replace("T", " "),
        "reason": lambda shown: shown["reason"],
        "bytes": lambda shown: "-" if shown["value_bytes"] is None else str(shown["value_bytes"]),
        "message": lambda shown: f"content left out; {shown['message']}" if shown["left_out"] else shown["message"],
    }
    caption = f"The newest {len(dead_letters)}; {older} older ones are not shown." if older > 0 else ""
    return render_table(rows, columns, text=("record", "time (UTC)", "reason", "message"), caption=caption)


def readable(value: bytes | None) -> str | None:
    """Text, or base64 after `base64:` if the bytes are not UTF-8."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"


def _read(config: Path) -> "Iterator[DeadLetter]":
    from connectors.open import read_dead_letters  # noqa: PLC0415 - not needed for --help

    return read_dead_letters(load_settings(config))


def _time(milliseconds: int | None) -> str | None:
    if not milliseconds or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
    except (ValueError, OverflowError):
        return None


def _print_json(value: dict[str, object], *, indent: bool = False) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else 0).decode())  # noqa: T201


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)
