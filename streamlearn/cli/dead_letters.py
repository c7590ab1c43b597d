"""The dead-letters commands: list, show and export what was set aside, and put it back."""

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from streamlearn.cli.options import ConfigOption, JsonOption, err, load_settings, out
from streamlearn.errors import UsageError

if TYPE_CHECKING:
    from connectors.dead_letters import StoredDeadLetter
import base64
import binascii
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from rich.console import RenderableType

from connectors.dead_letters import DeadLetterId, Repair, StoredDeadLetter, parse_where
from connectors.jsonl import read_lines
from connectors.open import open_replayer, read_dead_letters
from connectors.replay import Replayer
from streamlearn.cli.status import Cell, render_table
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import Settings, StreamSettings
from streamlearn.stream.parse import parse
from streamlearn.stream.record import RecordId, TopicPartition

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

    selection = _selection((), reason, topic, partition)
    newest: deque[StoredDeadLetter] = deque(maxlen=limit)
    total = 0
    for dead_letter in selection.select(read_dead_letters(load_settings(config))):
        newest.append(dead_letter)
        total += 1
    if as_json:
        for each in newest:
            _print_json(row(each))
    else:
        out.print(table(list(newest), total))


@app.command()
def show(
    where: Annotated[str, typer.Argument(help="The record, as `dead-letters list` shows it.", metavar=_WHERE)],
    config: ConfigOption,
    content: Annotated[bool, typer.Option("--content", help="Also show key, headers and value.")] = False,
) -> None:
    """Show one dead letter as JSON: where, why, and the sizes of its content."""
    from connectors.open import read_dead_letters  # noqa: PLC0415 - not needed for --help

    found = list(_selection((where,)).select(read_dead_letters(load_settings(config))))
    if not found:
        raise UsageError(f"{where} is not among the dead letters: `streamlearn dead-letters list` lists them")
    for each in found:  # a topic that was created again has the same offsets again
        _print_json(details(each, content=content), indent=True)


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

    settings = load_settings(config)
    selected = _selection((), reason, topic, partition).select(read_dead_letters(settings))
    number = write(file, selected, settings.stream)
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

    return DeadLetterSelection.of(where, reason or (), topic, partition)


def _print_json(value: dict[str, object], *, indent: bool = False) -> None:
    print(orjson.dumps(value, option=orjson.OPT_INDENT_2 if indent else 0).decode())  # noqa: T201


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


# A file of dead letters to mend by hand: one JSON object per line.
#
# `value` is the record as an object where it is one, else as text; what is not text is in `value_base64`. `topic`,
# `partition`, `offset` and `timestamp` say which dead letter a line mends, and must stay as they are.
# `left_out_bytes` is the size of a value that was too large for the dead-letter topic; `value` is then null.


class Mended(NamedTuple):
    """A value to put back."""

    line: int
    id: DeadLetterId
    value: bytes | None


def write(path: Path, dead_letters: Iterable[StoredDeadLetter], limits: StreamSettings) -> int:
    """Write dead letters to a new file that only its owner may read; return their number.

    Raises:
        UsageError: the file exists, or its folder does not.
    """
    number = 0
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            for dead_letter in dead_letters:
                file.write(orjson.dumps(_entry(dead_letter, limits), option=orjson.OPT_APPEND_NEWLINE))
                number += 1
    except OSError as error:
        raise UsageError(f"{path} must be a new file in an existing folder: {error.strerror}") from error
    return number


def read(path: Path, limits: StreamSettings) -> Iterator[Mended]:
    """Yield the mended values.

    Raises:
        UsageError: a line names no dead letter, names one twice, or has a value that would be refused again.
        SourceError: the file cannot be read.
    """
    seen: dict[DeadLetterId, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        mended = _mended(path, number, line)
        if mended.id in seen:
            raise UsageError(f"{path} line {number} mends the same record as line {seen[mended.id]}: keep one of them")
        seen[mended.id] = number
        try:
            parse(mended.value, limits)
        except RecordError as error:
            raise UsageError(
                f"{path} line {number} would be a dead letter again ({error.reason}): {error}. Mend its value, or "
                "remove the line"
            ) from error
        yield mended


def _entry(dead_letter: StoredDeadLetter, limits: StreamSettings) -> dict[str, Any]:
    record = dead_letter.record
    identity = {
        "topic": record.origin.topic,
        "partition": record.origin.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
    }
    left_out = {} if dead_letter.left_out_bytes is None else {"left_out_bytes": dead_letter.left_out_bytes}
    why = {"reason": dead_letter.reason, "message": dead_letter.message}
    return identity | why | left_out | _shown(record.value, limits)


def _shown(value: bytes | None, limits: StreamSettings) -> dict[str, Any]:
    try:
        return {"value": parse(value, limits)}
    except RecordError:
        if value is None:
            return {"value": None}
    try:
        return {"value": value.decode()}
    except UnicodeDecodeError:
        return {"value_base64": base64.b64encode(value).decode()}


def _mended(path: Path, number: int, line: bytes) -> Mended:
    try:
        entry = orjson.loads(line)
        record = RecordId(TopicPartition(str(entry["topic"]), int(entry["partition"])), int(entry["offset"]))
        identity = DeadLetterId(record, int(entry["timestamp"]))
        if "value" not in entry:
            return Mended(number, identity, base64.b64decode(entry["value_base64"], validate=True))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, binascii.Error) as error:
        raise UsageError(
            f"{path} line {number} must be one that `dead-letters export` wrote, with topic, partition, offset, "
            f"timestamp and value, found {error!r}"
        ) from error
    value = entry["value"]
    if value is None or isinstance(value, str):
        return Mended(number, identity, None if value is None else value.encode())
    return Mended(number, identity, orjson.dumps(value))


MAX_PORTION = 200
"""Dead letters that are put back at once."""
MAX_PORTION_BYTES = 16 << 20


@dataclass
class ReplayReport:
    """What became of the selected dead letters."""

    put_back: int = 0
    already: int = 0
    """Put back before, by this or an earlier replay."""
    of_other_streams: int = 0
    """From topics or files that the configuration does not read."""
    unusable: Counter[str] = field(default_factory=Counter)
    """Would be dead letters again, by reason."""
    left_out: int = 0
    """Without their content, which was too large for the dead-letter topic."""


def put_back(
    dead_letters: Iterable[StoredDeadLetter],
    replayer: Replayer,
    settings: Settings,
    *,
    again: bool = False,
    report: Callable[[ReplayReport], None] = lambda _: None,
) -> ReplayReport:
    """Put dead letters back as they are, each once.

    Args:
        dead_letters: Those that are selected.
        replayer: Where to.
        settings: Name the stream and the limits of a record.
        again: Whether to put back also those that were before.
        report: Called after each portion.

    Raises:
        DeadLetterError: a portion could not be put back; those before it were.
    """
    return _put_back(_as_they_are(dead_letters), replayer, settings, again, report)


def replay_mended(
    mended: Mapping[DeadLetterId, Mended],
    dead_letters: Iterable[StoredDeadLetter],
    replayer: Replayer,
    settings: Settings,
    *,
    again: bool = False,
    report: Callable[[ReplayReport], None] = lambda _: None,
) -> ReplayReport:
    """Put back the mended values, each once. Arguments and errors are those of `replay`."""
    return _put_back(_repairs(mended, dead_letters), replayer, settings, again, report)


def check_known(mended: Mapping[DeadLetterId, Mended], known: Iterable[StoredDeadLetter]) -> None:
    """Check that every mended value belongs to a dead letter that is still there.

    Raises:
        UsageError: one does not, so it cannot be known whether it was put back.
    """
    missing = set(mended) - {each.id for each in known}
    if missing:
        first = min(missing, key=lambda each: mended[each].line)
        raise UsageError(
            f"line {mended[first].line} mends {first}, which is not among the dead letters: its identity was changed, "
            f"or retention deleted it ({len(missing)} such lines). Send such records with `streamlearn feed`"
        )


def _as_they_are(dead_letters: Iterable[StoredDeadLetter]) -> Iterator[tuple[StoredDeadLetter, bytes | None]]:
    return ((each, each.record.value) for each in dead_letters)


def _repairs(
    mended: Mapping[DeadLetterId, Mended], dead_letters: Iterable[StoredDeadLetter]
) -> Iterator[tuple[StoredDeadLetter, bytes | None]]:
    return ((each, mended[each.id].value) for each in dead_letters if each.id in mended)


def _put_back(
    candidates: Iterable[tuple[StoredDeadLetter, bytes | None]],
    replayer: Replayer,
    settings: Settings,
    again: bool,
    report: Callable[[ReplayReport], None],
) -> ReplayReport:
    found = ReplayReport()
    replayed = set(() if again else replayer.replayed())
    portion: list[Repair] = []

    def flush() -> None:
        if portion:
            replayer.put_back(portion)
            found.put_back += len(portion)
            portion.clear()
            report(found)

    for dead_letter, value in candidates:
        repair = _repair(dead_letter, value, settings, replayed, found)
        if repair is None:
            continue
        if sum(len(each.value) for each in portion) + len(repair.value) > MAX_PORTION_BYTES:
            flush()
        portion.append(repair)
        replayed.add(dead_letter.id)
        if len(portion) == MAX_PORTION:
            flush()
    flush()
    return found


def _repair(
    dead_letter: StoredDeadLetter,
    value: bytes | None,
    settings: Settings,
    replayed: set[DeadLetterId],
    found: ReplayReport,
) -> Repair | None:
    """What is to be put back; None, and counted, if it is not."""
    if dead_letter.record.origin.topic not in stream_of(settings):
        found.of_other_streams += 1
        return None
    if dead_letter.id in replayed:
        found.already += 1
        return None
    if value is None and dead_letter.left_out_bytes is not None:
        found.left_out += 1
        return None
    try:
        parse(value, settings.stream)
    except RecordError as error:
        found.unusable[str(error.reason)] += 1
        return None
    assert value is not None, "parse refuses an absent value"
    return Repair(dead_letter, value)


def stream_of(settings: Settings) -> tuple[str, ...]:
    """The topics of the stream, or the name of its file."""
    if settings.source.kafka is not None:
        return settings.source.kafka.topics
    assert settings.source.jsonl is not None, "the settings name exactly one source"
    return (settings.source.jsonl.path.name,)


@dataclass(frozen=True)
class DeadLetterSelection:
    """Filters that must all hold; without any, every dead letter is selected."""

    records: frozenset[RecordId] = frozenset()
    reasons: frozenset[str] = frozenset()
    topic: str | None = None
    partition: int | None = None

    @classmethod
    def of(
        cls,
        where: Iterable[str] = (),
        reasons: Iterable[str] = (),
        topic: str | None = None,
        partition: int | None = None,
    ) -> Self:
        """Read the options of a command.

        Raises:
            UsageError: a record is not TOPIC:PARTITION:OFFSET, or a reason is not known.
        """
        names = [each.value for each in Reason]
        for reason in reasons:
            if reason not in names:
                raise UsageError(f"--reason {reason} is not known: expected one of {', '.join(names)}")
        return cls(frozenset(map(parse_where, where)), frozenset(reasons), topic, partition)

    @property
    def is_everything(self) -> bool:
        """Whether there is no filter."""
        return self == DeadLetterSelection()

    def select(self, dead_letters: Iterable[StoredDeadLetter]) -> Iterator[StoredDeadLetter]:
        """Yield the dead letters that are selected."""
        return filter(self._selects, dead_letters)

    def _selects(self, dead_letter: StoredDeadLetter) -> bool:
        origin = dead_letter.record.origin
        return (
            (not self.records or dead_letter.record.id in self.records)
            and (not self.reasons or dead_letter.reason in self.reasons)
            and self.topic in (None, origin.topic)
            and self.partition in (None, origin.partition)
        )


class ReplaySession:
    """Replays into the stream of a configuration."""

    def __init__(self, settings: Settings, *, again: bool, dry_run: bool) -> None:
        """Take the configuration.

        Args:
            settings: Name the dead letters and the stream.
            again: Whether to put back also those that were before.
            dry_run: Whether to put back nothing, and only count.
        """
        self._settings = settings
        self._again = again
        self._dry_run = dry_run

    def selected(self, selection: DeadLetterSelection, report: Callable[[ReplayReport], None]) -> ReplayReport:
        """Put back what is selected, as it is."""
        with closing(self._replayer()) as replayer:
            dead_letters = selection.select(read_dead_letters(self._settings))
            return put_back(dead_letters, replayer, self._settings, again=self._again, report=report)

    def mended(self, path: Path, report: Callable[[ReplayReport], None]) -> ReplayReport:
        """Put back the values of an exported file, all of which are checked before."""
        mended = {each.id: each for each in read(path, self._settings.stream)}
        check_known(mended, read_dead_letters(self._settings))
        with closing(self._replayer()) as replayer:
            dead_letters = read_dead_letters(self._settings)
            return replay_mended(mended, dead_letters, replayer, self._settings, again=self._again, report=report)

    def _replayer(self) -> Replayer:
        replayer = open_replayer(self._settings)
        return _DryReplayer(replayer) if self._dry_run else replayer


class _DryReplayer:
    """Knows what was put back, and puts nothing back."""

    def __init__(self, replayer: Replayer) -> None:
        self._replayer = replayer
        self.replayed = replayer.replayed
        self.close = replayer.close

    def put_back(self, repairs: Sequence[Repair]) -> None:
        """Do nothing."""


def row(dead_letter: StoredDeadLetter) -> dict[str, Any]:
    """Everything but the content; `left_out` says that the dead-letter topic was too small for it."""
    record = dead_letter.record
    return {
        "where": dead_letter.where,
        "topic": record.origin.topic,
        "partition": record.origin.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        "set_aside_at": _time(dead_letter.written_ms),
        "reason": dead_letter.reason,
        "stage": dead_letter.stage,
        "message": dead_letter.message,
        "value_bytes": _value_bytes(dead_letter),
        "left_out": dead_letter.left_out_bytes is not None,
    }


def details(dead_letter: StoredDeadLetter, *, content: bool) -> dict[str, Any]:
    """One dead letter, with key, headers and value if `content` is asked for, else with their sizes."""
    record = dead_letter.record
    shown = row(dead_letter) | {
        "key_bytes": None if record.key is None else len(record.key),
        "headers": [{"name": name, "bytes": len(value)} for name, value in record.headers],
    }
    if content:
        shown["key"] = readable(record.key)
        shown["headers"] = [{"name": name, "value": readable(value)} for name, value in record.headers]
        shown["value"] = readable(record.value)
    return shown


def table(dead_letters: Sequence[StoredDeadLetter], total: int) -> RenderableType:
    """One row per dead letter; `total` is how many there are."""
    if not dead_letters:
        return "no dead letters" if not total else f"none of {total} dead letters is selected"
    left_out = total - len(dead_letters)
    columns: dict[str, Cell[StoredDeadLetter]] = {
        "record": lambda letter: letter.where,
        "time (UTC)": _shown_time,
        "reason": lambda letter: letter.reason,
        "bytes": _bytes,
        "message": _message,
    }
    caption = f"The newest {len(dead_letters)}; {left_out} older ones are left out." if left_out > 0 else ""
    return render_table(dead_letters, columns, text=("record", "time (UTC)", "reason", "message"), caption=caption)


def readable(value: bytes | None) -> str | None:
    """Text, or base64 after `base64:` where it is none."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(value).decode()}"


def _value_bytes(dead_letter: StoredDeadLetter) -> int | None:
    """Size of the record's value, also of one that was left out; None for a record without a value."""
    value = dead_letter.record.value
    return dead_letter.left_out_bytes if value is None else len(value)


def _bytes(dead_letter: StoredDeadLetter) -> str:
    size = _value_bytes(dead_letter)
    return "-" if size is None else str(size)


def _message(dead_letter: StoredDeadLetter) -> str:
    return dead_letter.message if dead_letter.left_out_bytes is None else f"content left out; {dead_letter.message}"


def _shown_time(dead_letter: StoredDeadLetter) -> str:
    """When it was set aside, or, from a file, the record's own time."""
    time = _time(dead_letter.written_ms or dead_letter.record.timestamp_ms)
    return "-" if time is None else time[:19].replace("T", " ")


def _time(milliseconds: int | None) -> str | None:
    if not milliseconds or milliseconds < 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
    except (ValueError, OverflowError):
        return None
