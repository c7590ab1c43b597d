"""The replay of dead letters: which are put back, with which value, and which are left."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from connectors.replayer import Replayer
from connectors.stored_dead_letter import DeadLetterId, Repair, StoredDeadLetter
from streamlearn.commands.dead_letter_export import Mended
from streamlearn.errors import RecordError, UsageError
from streamlearn.settings import Settings
from streamlearn.stream.parse import parse

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


def replay(
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
