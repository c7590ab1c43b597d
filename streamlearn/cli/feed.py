"""The feed command: files as records of a Kafka topic."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamlearn.cli.options import err, out
from streamlearn.errors import UsageError

if TYPE_CHECKING:
    from connectors.kafka.feed import FeedResult
    from connectors.rows import FeedRecord, Records
    from streamlearn.settings import KafkaSettings

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_COLUMN = "COLUMN|TEMPLATE"


def feed(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL, CSV or TSV (gzip if the name ends in .gz), Parquet, Arrow, or the folder of a data set.",
            exists=True,
        ),
    ],
    topic: Annotated[str, typer.Option(help="Topic to write to; it must exist.", metavar="NAME")],
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="Use the cluster in source.kafka of this file.", metavar="FILE"),
    ] = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(help="Brokers without TLS on this machine, instead of --config.", metavar="HOST:PORT"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(help="Column of the prompt, or text with columns in braces: '{title}: {body}'.", metavar=_COLUMN),
    ] = None,
    completion: Annotated[str | None, typer.Option(help="The same for the completion.", metavar=_COLUMN)] = None,
    text: Annotated[str | None, typer.Option(help="The same for plain text.", metavar=_COLUMN)] = None,
    messages: Annotated[str | None, typer.Option(help="Column of the chat messages.", metavar="COLUMN")] = None,
    image: Annotated[
        str | None, typer.Option(help="Column of the image or images, beside a prompt or messages.", metavar="COLUMN")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(help="Column to pass through unread, in `meta`; may be repeated.", metavar="COLUMN"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a folder that has several, such as train.", metavar="NAME")
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="Separator of the cells of CSV.", metavar="CHARACTER")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Records per second. As fast as possible if absent.", min=1e-3, metavar="N")
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Start over at the end, until Ctrl-C or --records.")] = False,
    records: Annotated[int | None, typer.Option(help="Number of records to send.", min=1, metavar="N")] = None,
    skip: Annotated[int, typer.Option(help="Number of records to leave out first.", min=0, metavar="N")] = 0,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Leave out and count rows that cannot become a record.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check everything; send nothing.")] = False,
) -> None:
    """Write files to a Kafka topic, one record per line or row.

    Returns once all in-sync replicas have acknowledged every record. Without a mapping, lines of JSONL are sent as they
    stand, and columns of other files are taken if they are named like a record's fields. Ctrl-C waits for the
    acknowledgements of what was sent.
    """
    from streamlearn.daemon.process import StopSignals  # noqa: PLC0415 - not needed for --help

    named = {"prompt": prompt, "completion": completion, "text": text, "messages": messages, "image": image}
    fields = {field: column for field, column in named.items() if column is not None}
    portion = Portion(rate, loop, records, skip)
    cluster = None if dry_run else cluster_of(config, bootstrap_servers)
    opened = open_records(file, fields, meta or [], split, delimiter, skip_bad_rows=skip_bad_rows)
    if cluster is None:
        _say(*preview(opened, portion))
        return
    stop = threading.Event()
    signals = StopSignals()
    signals.call_on_signal(lambda _: stop.set())
    with signals.installed():
        result = send(opened, portion, topic, cluster, stop)
    _say(summary(result, topic, opened))
    if stop.is_set() and not loop:
        _say(f"interrupted: continue with --skip {skip + result.acknowledged}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Portion:
    """Which of the records are sent, and how fast."""

    rate: float | None = None
    """Records per second."""
    loop: bool = False
    records: int | None = None
    skip: int = 0


def cluster_of(config: Path | None, bootstrap_servers: str | None) -> "KafkaSettings":
    """The cluster to write to, from a configuration file or from broker addresses.

    Raises:
        UsageError: none or both were given, a broker is not on this machine, or there is no source.kafka.
        ConfigError: the configuration cannot be used.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - not needed for --help

    from streamlearn.settings import KafkaSettings, load  # noqa: PLC0415

    if config is None and bootstrap_servers is None:
        raise UsageError("feed needs a cluster to write to: add --config FILE or --bootstrap-servers HOST:PORT")
    if config is not None and bootstrap_servers is not None:
        raise UsageError("--config and --bootstrap-servers both name a cluster: keep one")
    if config is None:
        try:
            return KafkaSettings(bootstrap_servers=bootstrap_servers, topics=("unused",), security_protocol="PLAINTEXT")
        except ValidationError as error:
            raise UsageError(
                f"--bootstrap-servers: expected brokers on this machine, since it connects without TLS, found "
                f"{bootstrap_servers}; use --config FILE for any other cluster"
            ) from error
    kafka = load(config).source.kafka
    if kafka is None:
        raise UsageError(f"{config} has no source.kafka, but feed writes to a Kafka topic: add --bootstrap-servers")
    return kafka


def open_records(
    path: Path,
    fields: dict[str, str],
    meta: Sequence[str] = (),
    split: str | None = None,
    delimiter: str | None = None,
    *,
    skip_bad_rows: bool = False,
) -> "Records":
    """Open a file or a folder, check its columns, and read its first record.

    Raises:
        UsageError: the options do not fit the file.
        SourceError: it cannot be read, its first row cannot become a record, or it has no records.
    """
    from connectors.rows import ColumnMapping, Records, open_file  # noqa: PLC0415 - not needed for --help

    file = open_file(path, split=split, delimiter=delimiter)
    mapping = None
    if fields:
        mapping = ColumnMapping(fields, meta)
    elif file.columns is not None:
        mapping = ColumnMapping.by_name(file.columns, path, meta)
    elif meta:
        raise UsageError("--meta needs a mapping of the other columns too, such as --prompt and --completion")
    records = Records(file, mapping, skip_bad_rows=skip_bad_rows)
    if records.first() is None:
        raise UsageError(f"{path}: expected at least one record, found none")
    return records


def portion_of(records: "Records", portion: Portion, stop: threading.Event) -> "Iterator[FeedRecord]":
    """Yield the records that are to be sent, when each is due, until `stop` is set."""
    pacer = Pacer(portion.rate, stop)
    end = None if portion.records is None else portion.skip + portion.records
    for record in islice(_passes(records, portion.loop), portion.skip, end):
        if not pacer.wait():
            return
        yield record


_MAX_DEBT_S = 1.0
"""After a pause longer than this the schedule starts over, so that no burst follows."""
_MIN_WAIT_S = 0.001  # a shorter wait costs more than it is worth; the next one makes up for it


class Pacer:
    """Due times `1 / rate` apart, from the monotonic clock. Delays of up to a second are caught up with."""

    def __init__(
        self,
        rate: float | None,
        stop: threading.Event,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        """Take the rate, per second; None is as fast as possible. `wait` sleeps, at most until `stop` is set."""
        self._interval_s = 1.0 / rate if rate else 0.0
        self._stop = stop
        self._clock = clock
        self._wait = wait or stop.wait
        self._due: float | None = None

    def wait(self) -> bool:
        """Wait until the next record is due; return False if it is time to stop instead."""
        if self._interval_s and not self._stop.is_set():
            now = self._clock()
            if self._due is None or now - self._due > _MAX_DEBT_S:
                self._due = now
            if self._due - now > _MIN_WAIT_S:
                self._wait(self._due - now)
            self._due += self._interval_s
        return not self._stop.is_set()


def send(
    records: "Records", portion: Portion, topic: str, cluster: "KafkaSettings", stop: threading.Event
) -> "FeedResult":
    """Send the records, with progress on stderr; once `stop` is set, wait only for what was sent.

    Raises:
        SourceError: a file or the cluster cannot be used.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - not for --help

    from connectors.kafka.feed import feed as feed_topic  # noqa: PLC0415

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[sent]}"), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(f"to {topic}", total=None, sent="")

        def report(result: "FeedResult") -> None:
            share = result.sent / portion.records if portion.records else records.fraction
            total = None if share is None else 1.0
            progress.update(task, total=total, completed=share, sent=f"{result.acknowledged} acknowledged")

        return feed_topic(cluster, topic, portion_of(records, portion, stop), report=report)


def summary(result: "FeedResult", topic: str, records: "Records") -> str:
    rate = result.acknowledged / result.seconds if result.seconds else 0.0
    text = (
        f"{result.sent} records sent, {result.acknowledged} acknowledged by {topic} in {result.seconds:.1f} s "
        f"({rate:.0f} a second)"
    )
    return f"{text}; {records.num_skipped} bad rows left out" if records.num_skipped else text


def preview(records: "Records", portion: Portion) -> Sequence[str]:
    """Read everything that would be sent, and say what it is: how much, from which columns, and the first record."""
    first, number = "", 0
    for record in portion_of(records, Portion(records=portion.records, skip=portion.skip), threading.Event()):
        first = first or f"{record.place}: {record.value.decode('utf-8', 'replace')}"
        number += 1
    return [
        f"columns: {records.mapping or 'none mapped, lines are sent as they stand'}",
        f"first record: {first or 'none'}",
        f"{number} records would be sent; {records.num_skipped} bad rows left out",
    ]


def _passes(records: "Records", loop: bool) -> "Iterator[FeedRecord]":
    yield from records
    while loop and records.first() is not None:  # the file may be emptied meanwhile
        yield from records
