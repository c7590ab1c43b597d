"""The feed command: files as records of a Kafka topic."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from streamlearn.commands.options import err, out
from streamlearn.runtime.signals import StopSignals

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
    delimiter: Annotated[str | None, typer.Option(help="What separates the cells of CSV.", metavar="CHARACTER")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Records per second. As fast as possible if absent.", min=1e-3, metavar="N")
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Begin again at the end, until Ctrl-C or --records.")] = False,
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
    from streamlearn.commands import feeding  # noqa: PLC0415 - not needed for --help

    named = {"prompt": prompt, "completion": completion, "text": text, "messages": messages, "image": image}
    fields = {field: column for field, column in named.items() if column is not None}
    options = feeding.FileOptions(fields, tuple(meta or ()), split, delimiter, skip_bad_rows)
    portion = feeding.Portion(rate, loop, records, skip)
    if dry_run:
        _say(*feeding.preview(feeding.open_records(file, options), portion))
        return
    cluster = feeding.cluster_of(config, bootstrap_servers)
    opened = feeding.open_records(file, options)
    stop = threading.Event()
    signals = StopSignals()
    signals.call_on_signal(lambda _: stop.set())
    with signals.installed():
        result = feeding.send(opened, portion, topic, cluster, stop=stop, console=err)
    _say(feeding.summary(result, topic, opened))
    if stop.is_set() and not loop:
        _say(f"interrupted: go on with --skip {skip + result.acknowledged}")
        raise typer.Exit(EXIT_INTERRUPTED)


def _say(*lines: str) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
