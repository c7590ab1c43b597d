"""What the feed command does: records of files to a Kafka topic, with progress, a rate and an orderly end."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from connectors.files.column_mapping import ColumnMapping
from connectors.files.open_files import open_files
from connectors.files.record_files import FeedRecord, RecordFiles
from connectors.kafka.feed import FeedResult, feed
from connectors.pacer import Pacer
from streamlearn.errors import UsageError
from streamlearn.settings import KafkaSettings, load


@dataclass(frozen=True)
class FileOptions:
    """Which records a file has."""

    fields: dict[str, str]
    """Field of a record to a column or template."""
    meta: tuple[str, ...] = ()
    split: str | None = None
    delimiter: str | None = None
    skip_bad_rows: bool = False


@dataclass(frozen=True)
class Portion:
    """Which of the records are sent, and how fast."""

    rate: float | None = None
    """Records per second."""
    loop: bool = False
    records: int | None = None
    skip: int = 0


def cluster_of(config: Path | None, bootstrap_servers: str | None) -> KafkaSettings:
    """The cluster to write to, from a configuration file or from broker addresses.

    Raises:
        UsageError: none or both were given, a broker is not on this machine, or there is no source.kafka.
        ConfigError: the configuration cannot be used.
    """
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


def open_records(path: Path, options: FileOptions) -> RecordFiles:
    """Open a file or a folder, check its columns, and read its first record.

    Raises:
        UsageError: the options do not fit the file.
        SourceError: it cannot be read, its first row cannot become a record, or it has no records.
    """
    files = open_files(path, split=options.split, delimiter=options.delimiter)
    mapping = None
    first = next((file for file in files if file.columns is not None), None)
    if options.fields:
        mapping = ColumnMapping(options.fields, options.meta)
    elif first is not None:
        mapping = ColumnMapping.by_name(first.columns or (), first.path, options.meta)
    elif options.meta:
        raise UsageError("--meta needs a mapping of the other columns too, such as --prompt and --completion")
    records = RecordFiles(files, mapping, skip_bad_rows=options.skip_bad_rows)
    if records.first() is None:
        raise UsageError(f"{path}: expected at least one record, found none")
    return records


def portion_of(records: RecordFiles, portion: Portion, stop: threading.Event) -> Iterator[FeedRecord]:
    """Yield the records that are to be sent, when each is due, until `stop` is set."""
    pacer = Pacer(portion.rate, stop)
    end = None if portion.records is None else portion.skip + portion.records
    for record in islice(_passes(records, portion.loop), portion.skip, end):
        if not pacer.wait():
            return
        yield record


def send(
    records: RecordFiles,
    portion: Portion,
    topic: str,
    cluster: KafkaSettings,
    *,
    stop: threading.Event,
    console: Console,
) -> FeedResult:
    """Send the records, with progress on `console`; once `stop` is set, wait only for what was sent.

    Raises:
        SourceError: a file or the cluster cannot be used.
    """
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[sent]}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"to {topic}", total=1.0, sent="")

        def report(result: FeedResult) -> None:
            share = (result.sent / portion.records) if portion.records else records.fraction
            progress.update(task, completed=share, sent=f"{result.acknowledged} acknowledged")

        return feed(cluster, topic, portion_of(records, portion, stop), report=report)


def summary(result: FeedResult, topic: str, records: RecordFiles) -> str:
    """What was sent, for people."""
    rate = result.acknowledged / result.seconds if result.seconds else 0.0
    text = (
        f"{result.sent} records sent, {result.acknowledged} acknowledged by {topic} in {result.seconds:.1f} s "
        f"({rate:.0f} a second)"
    )
    return f"{text}; {records.num_skipped} bad rows left out" if records.num_skipped else text


def preview(records: RecordFiles, portion: Portion) -> Sequence[str]:
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


def _passes(records: RecordFiles, loop: bool) -> Iterator[FeedRecord]:
    """One pass over the files, or one after another."""
    yield from records
    while loop and records.first() is not None:  # the files may be emptied meanwhile
        yield from records
