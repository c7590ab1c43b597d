"""The feed command: files as records of a Kafka topic."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamlearn.cli.options import err, natural, number, out, positive
from streamlearn.errors import ConfigError, RecordError, SourceError, UsageError

if TYPE_CHECKING:
    from connectors.columns import Records
    from connectors.kafka.feed import FeedResult
    from connectors.rows import FeedRecord, RowFile
    from streamlearn.settings import KafkaSettings

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_COLUMN = "COLUMN|TEMPLATE"


def feed(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSONL, CSV or TSV (gzip if the name ends in .gz), Parquet, Arrow, or the folder of a data set; - is "
            "JSONL from the standard input.",
        ),
    ],
    topic: Annotated[str, typer.Option(help="Topic to write to; it must exist.", metavar="NAME")],
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Check records as a daemon with this file reads them, and write to the cluster in source.kafka.",
            metavar="FILE",
        ),
    ] = None,
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(help="Brokers without TLS on this machine, instead of source.kafka.", metavar="HOST:PORT"),
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
    tools: Annotated[
        str | None, typer.Option(help="Column of the tools that messages may call.", metavar="COLUMN")
    ] = None,
    meta: Annotated[
        list[str] | None,
        typer.Option(help="Column to pass through unread, in `meta`; may be repeated.", metavar="COLUMN"),
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a folder that has several, such as train.", metavar="NAME")
    ] = None,
    subset: Annotated[
        str | None, typer.Option(help="Subset (configuration) of a folder that has several.", metavar="NAME")
    ] = None,
    delimiter: Annotated[str | None, typer.Option(help="Separator of the cells of CSV.", metavar="CHARACTER")] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Records per second. As fast as possible if absent.", parser=number(1e-3, 1e6), metavar="N"),
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Start over at the end, until Ctrl-C or --records.")] = False,
    records: Annotated[
        int | None, typer.Option(help="Number of records to send.", parser=positive, metavar="N")
    ] = None,
    skip: Annotated[int, typer.Option(help="Number of records to leave out first.", parser=natural, metavar="N")] = 0,
    skip_bad_rows: Annotated[
        bool,
        typer.Option(
            "--skip-bad-rows",
            help="Leave out and count rows that cannot become a record, or that a daemon would refuse.",
        ),
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Send records without checking that a daemon would learn them.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check everything; send nothing.")] = False,
) -> None:
    """Write files to a Kafka topic, one record per line or row.

    Every record is checked before the first is sent; those of a pipe and with --skip-bad-rows one by one. Returns once
    all in-sync replicas have acknowledged every record. Without a mapping, lines of JSONL are sent as they stand, and
    columns of other files are taken if they are named like a record's fields, or all if the configuration maps them.
    Ctrl-C waits for the acknowledgements of what was sent.
    """
    from streamlearn.daemon.process import StopSignals  # noqa: PLC0415 - not needed for --help

    named = {
        "prompt": prompt,
        "completion": completion,
        "text": text,
        "messages": messages,
        "image": image,
        "tools": tools,
    }
    fields = {field: column for field, column in named.items() if column is not None}
    portion = Portion(rate, loop, records, skip)
    cluster = None if dry_run else cluster_of(config, bootstrap_servers)
    stop = threading.Event()
    from connectors.rows import open_file  # noqa: PLC0415

    rows = open_file(file, split=split, subset=subset, delimiter=delimiter, stopped=stop.is_set)
    if loop and rows.is_pipe:
        raise UsageError(f"--loop reads a file again, but {file} is a pipe, which can be read once: leave it out")
    checker = None if no_check else RecordCheck(config)
    opened = open_records(rows, fields, meta or [], skip_bad_rows=skip_bad_rows or dry_run, check=checker)
    if cluster is None:
        _say(*preview(opened, portion), *([checker.scope] if checker else ["records were not checked (--no-check)"]))
        if opened.refused and not skip_bad_rows:
            raise SourceError(
                f"{file}: {opened.refused.total()} rows would be refused: correct them, or leave them out with "
                "--skip-bad-rows"
            )
        return
    opened.num_trusted = 0 if skip_bad_rows else skip
    if checker is not None and not (rows.is_pipe or skip_bad_rows):
        opened.num_trusted = skip + check_all(opened, portion)
    signals = StopSignals()
    signals.call_on_signal(lambda _: stop.set())
    with signals.installed():
        result = send(opened, portion, topic, cluster, stop)
    if not result.sent and not stop.is_set():
        raise UsageError(f"{file}: expected at least one record, found none{_refused(opened)}")
    _say(summary(result, topic, opened))
    if stop.is_set() and not loop:
        _say("interrupted" if rows.is_pipe else f"interrupted: continue with --skip {skip + result.acknowledged}")
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
        UsageError: none or two clusters were given, or a broker is not on this machine.
        ConfigError: the configuration cannot be used.
    """
    from pydantic import ValidationError  # noqa: PLC0415 - not needed for --help

    from streamlearn.settings import KafkaSettings, load  # noqa: PLC0415

    if config is None and bootstrap_servers is None:
        raise UsageError("feed needs a cluster to write to: add --config FILE or --bootstrap-servers HOST:PORT")
    kafka = None if config is None else load(config).source.kafka
    if kafka is not None and bootstrap_servers is not None:
        raise UsageError(f"{config} and --bootstrap-servers both name a cluster: keep one")
    if bootstrap_servers is not None:
        try:
            return KafkaSettings(bootstrap_servers=bootstrap_servers, topics=("unused",), security_protocol="PLAINTEXT")
        except ValidationError as error:
            raise UsageError(
                f"--bootstrap-servers: expected brokers on this machine, since it connects without TLS, found "
                f"{bootstrap_servers}; use --config FILE for any other cluster"
            ) from error
    if kafka is None:
        raise UsageError(f"{config} has no source.kafka, but feed writes to a Kafka topic: add --bootstrap-servers")
    return kafka


class RecordCheck:
    """The daemon's own decoder, without the model's weights.

    Where no configuration names the daemon's backbone, or its files are not on this machine, the bundled image-text
    model stands in for it. Then everything but tokens and lengths is checked.
    """

    def __init__(self, config: Path | None) -> None:
        """Load the tokenizer.

        Raises:
            ConfigError: the configuration cannot be used.
        """
        from streamlearn.backbone.load import load_preprocessing, outline  # noqa: PLC0415 - imports torch
        from streamlearn.daemon.model import decoder_of  # noqa: PLC0415
        from streamlearn.model_files import locate  # noqa: PLC0415
        from streamlearn.settings import BackboneSettings, Settings, load  # noqa: PLC0415
        from streamlearn.stream.position import TopicPartition  # noqa: PLC0415
        from streamlearn.stream.record import Record  # noqa: PLC0415

        settings = Settings.model_validate({"source": {"jsonl": {"path": "-"}}}) if config is None else load(config)
        self._scope = f"checked as a daemon with {config} reads them"
        self._num_truncated = self._num_cut = self._num_ignored = 0
        missing = "no --config names a daemon's" if config is None else ""
        try:
            if not missing and locate(settings.backbone) is None:
                missing = f"{settings.backbone.model} is not on this machine"
        except ConfigError as error:
            missing = str(error)
        if missing:
            limits = dict.fromkeys(_UNKNOWN_LIMITS if config is None else _LIMITS_IN_TOKENS, _NO_LIMIT)
            stream = settings.stream.model_copy(update=limits)
            backbone = BackboneSettings(model="builtin:nano-vl")
            settings = settings.model_copy(update={"backbone": backbone, "stream": stream})
            self._scope = f"checked without the backbone's tokens and limits: {missing}"
        shape = outline(settings.backbone)
        self._decoder = decoder_of(settings, load_preprocessing(settings.backbone, shape))
        self._record = partial(Record, TopicPartition("feed", 0), 0)
        self.has_mapping = bool(settings.records.mapped or settings.records.unwrap)
        self.reads_label = bool(self._decoder.mapping.labels)

    def __call__(self, value: bytes) -> None:
        """Raise RecordError if the record would become a dead letter."""
        try:
            truncation = self._decoder.decode(self._record(value)).truncation
        except RecordError as error:
            if error.reason not in self._decoder.mapping.ignored:
                raise
            self._num_ignored += 1
            return
        if truncation is not None:
            self._num_truncated += 1
            self._num_cut += truncation.num_cut

    @property
    def scope(self) -> str:
        """How records were checked, and how many would be truncated, or ignored as `records` says."""
        cut = f"{self._num_truncated} would be cut to stream.max_tokens and lose {self._num_cut} tokens"
        ignored = f"{self._num_ignored} would be ignored, such as deletions"
        counts = [*([cut] if self._num_truncated else []), *([ignored] if self._num_ignored else [])]
        return "; ".join([self._scope, *counts])


_LIMITS_IN_TOKENS = ("max_tokens", "batch_tokens")
_UNKNOWN_LIMITS = (*_LIMITS_IN_TOKENS, "max_record_bytes", "max_string_chars", "max_images", "max_image_pixels")
_NO_LIMIT = 1 << 30
_SHOWN = 1_000
"""Maximum characters of the record that a dry run shows."""


def open_records(
    file: "RowFile",
    fields: dict[str, str],
    meta: Sequence[str] = (),
    *,
    skip_bad_rows: bool = False,
    check: RecordCheck | None = None,
) -> "Records":
    """Map a file's columns to the fields of a record.

    Raises:
        UsageError: the options do not fit the file.
    """
    from connectors.columns import ColumnMapping, Records, WholeRows  # noqa: PLC0415 - not needed for --help

    mapping: ColumnMapping | WholeRows | None = None
    passed = {"sample_type", "label"} if check is None or check.reads_label else {"sample_type"}
    if file.columns is not None:
        passed &= set(file.columns)
    if fields:
        mapping = ColumnMapping(fields, meta, passed)
    elif file.columns is not None and check is not None and check.has_mapping:
        mapping = WholeRows(file.columns)
    elif file.columns is not None:
        mapping = ColumnMapping.by_name(file.columns, file.path, meta, passed)
    elif meta:
        raise UsageError("--meta needs a mapping of the other columns too, such as --prompt and --completion")
    return Records(file, mapping, skip_bad_rows=skip_bad_rows, check=check)


def check_all(records: "Records", portion: Portion) -> int:
    """Check the records that are to be sent, with progress on stderr, and return their number.

    Raises:
        UsageError: there are none.
        SourceError: one of them would be refused, or the file cannot be read.
    """
    with err.status("checking"):
        end = None if portion.records is None else portion.skip + portion.records
        number = sum(1 for _ in islice(records, portion.skip, end))
    if not number:
        raise UsageError("expected at least one record, found none")
    return number


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
    return text + _refused(records)


def _refused(records: "Records") -> str:
    """What was left out, by reason."""
    counts = ", ".join(f"{count} {reason}" for reason, count in records.refused.most_common())
    return f"; {records.refused.total()} bad rows left out ({counts})" if counts else ""


def preview(records: "Records", portion: Portion) -> Sequence[str]:
    """Read everything that would be sent; say how much, from which columns, and what would be refused."""
    first, number = "", 0
    for record in portion_of(records, Portion(records=portion.records, skip=portion.skip), threading.Event()):
        first = first or f"{record.place}: {_shown(record.value)}"
        number += 1
    return [
        f"columns: {records.mapping or 'none mapped, lines are sent as they stand'}",
        f"first record: {first or 'none'}",
        f"{number} records would be sent{_refused(records) or '; 0 bad rows left out'}",
        *(f"first {reason}: {message}" for reason, message in records.first_refused.items()),
    ]


def _shown(value: bytes) -> str:
    """A record's value, without the middle of what is long, such as images."""
    text = value.decode("utf-8", "replace")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def _passes(records: "Records", loop: bool) -> "Iterator[FeedRecord]":
    yield from records
    while loop:
        record = None
        for record in records:
            yield record
        loop = record is not None  # the file may be emptied meanwhile
