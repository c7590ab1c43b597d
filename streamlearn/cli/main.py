"""The command line. Each command checks its arguments, calls one module and prints; heavy imports happen inside it."""

import atexit
import gc
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import orjson
import typer

from streamlearn import __version__
from streamlearn.cli import controls, dead_letters, streams
from streamlearn.cli.feed import feed
from streamlearn.cli.init import init, schema
from streamlearn.cli.options import (
    ConfigOption,
    JsonOption,
    err,
    load_settings,
    natural,
    number,
    out,
    positive,
)
from streamlearn.daemon.process import StopSignals, versions
from streamlearn.distributed import find_rank
from streamlearn.errors import ConfigError, StreamlearnError, UsageError, without_credentials
from streamlearn.events import Event, configure_logging, get_logger

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # records are tokenized one by one; a pool only warns on fork

app = typer.Typer(
    help="Keep a frozen Hugging Face model learning from an endless stream of records.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
controls.add_controls(app)
app.add_typer(controls.snapshots, name="snapshots")
app.add_typer(controls.regimes, name="regimes")
app.add_typer(dead_letters.app, name="dead-letters")


class ExportFormat(StrEnum):
    """What `export` writes."""

    PEFT = "peft"
    GGUF = "gguf"


_TYPER_USAGE_ERROR = 2  # sysexits.h says 64
_SERVICES = ("run", "gateway")
"""Commands that print for people only; the result of all others is their output."""


def main() -> None:
    """Run the command line. A StreamlearnError ends it with one message and its exit code, never with a traceback."""
    atexit.register(gc.freeze)  # otherwise the interpreter's last collection walks all imported modules: 1.7 s
    streams.guard()
    configure_logging("warning")  # to standard error; `run` applies the configuration's own level
    try:
        app()
    except StreamlearnError as error:
        if not error.is_logged:
            err.print(f"streamlearn: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as finished:
        lost = streams.lost_output()
        if not finished.code and lost is not None and sys.argv[1:2] not in ([name] for name in _SERVICES):
            err.print(f"streamlearn: standard output cannot be written: {lost}", style="red", soft_wrap=True)
            sys.exit(os.EX_IOERR)
        sys.exit(UsageError.exit_code if finished.code == _TYPER_USAGE_ERROR else finished.code)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"streamlearn {__version__}", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    del version


@app.command()
def run(
    config: ConfigOption,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from scratch; existing snapshots are renamed.")] = False,
    accept_config_change: Annotated[
        bool,
        typer.Option(
            "--accept-config-change",
            help="Resume even if settings that affect training differ from the snapshot's.",
        ),
    ] = False,
    segment_by: Annotated[
        str | None,
        typer.Option(
            "--segment-by",
            metavar="KEY",
            help="Split the closing table where this key of the records' meta changes. Training never reads it.",
        ),
    ] = None,
) -> None:
    """Run the daemon: learn until the stream ends or a stop signal arrives.

    SIGTERM, SIGINT and SIGHUP stop it after the current step. It then writes a snapshot and exits 0.
    """
    signals = StopSignals()
    with signals.installed():  # before the import, which takes longer than the rest of a start
        try:
            settings = load_settings(config)
            place = find_rank(os.environ)
        except ConfigError:
            from streamlearn.settings import log_style  # noqa: PLC0415

            as_json = configure_logging(style=log_style(config))
            with streams.failures_as_events(get_logger("daemon"), Event.DAEMON_FAILED, as_json=as_json):
                raise
        from streamlearn.cli.run import run_daemon  # noqa: PLC0415

        run_daemon(
            settings,
            signals,
            place,
            fresh=fresh,
            accept_config_change=accept_config_change,
            segment_by=segment_by,
        )


app.command()(feed)
app.command()(init)
app.command()(schema)


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(help="Records with reference answers (JSONL).", exists=True, dir_okay=False)],
    config: ConfigOption,
    snapshot: Annotated[
        str | None,
        typer.Option(help="Evaluate this snapshot (or `newest`) instead of the running daemon.", metavar="NAME"),
    ] = None,
    generate: Annotated[
        bool, typer.Option("--generate", help="Also generate answers and score exact match and ROUGE-L.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per generated answer.", metavar="N", parser=positive)
    ] = 64,
    as_json: JsonOption = False,
) -> None:
    """Measure loss, perplexity and accuracy on a file of records.

    Evaluates the running daemon, or a snapshot with --snapshot.
    """
    settings = load_settings(config)
    from streamlearn.cli import offline  # noqa: PLC0415 - imports torch

    examples = offline.read_examples(file)
    if snapshot is None:
        result = offline.evaluate_daemon(settings, examples, generate=generate, max_new_tokens=max_new_tokens)
    else:
        result = offline.evaluate_snapshot(
            settings, snapshot, examples, generate=generate, max_new_tokens=max_new_tokens
        )
    if as_json:
        print(result.model_dump_json(indent=2))  # noqa: T201 - JSON must not pass through a renderer
    else:
        out.print(offline.evaluation_table(result))


@app.command("export")
def export_regimes(
    config: ConfigOption,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder to write to.", metavar="FOLDER", file_okay=False)],
    regime: Annotated[
        list[int] | None, typer.Option(help="Number of a regime; may be repeated.", metavar="N", parser=positive)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Export every regime.")] = False,
    snapshot: Annotated[str, typer.Option(help="Name of the snapshot.", metavar="NAME")] = "newest",
    form: Annotated[
        ExportFormat, typer.Option("--format", help="A folder for PEFT and vLLM, or an adapter for llama.cpp.")
    ] = ExportFormat.PEFT,
    approximate: Annotated[
        bool,
        typer.Option(
            "--approximate", help="Where tokens choose among experts, give each expert its mean weight instead."
        ),
    ] = False,
    base_model: Annotated[
        str | None,
        typer.Option(help="Name of the backbone in the files. By default its hub id or folder.", metavar="NAME"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write regimes of a snapshot as plain LoRAs for PEFT, vLLM and llama.cpp.

    Safe while a daemon is running. Each regime gets its own folder, with a model card that has its losses on its
    hold-out records.
    """
    if bool(regime) == every:
        raise UsageError("expected either --regime N or --all; `streamlearn status` lists the regimes")
    settings = load_settings(config)
    from streamlearn.cli import offline  # noqa: PLC0415 - imports torch

    exported = offline.export(
        settings,
        snapshot=snapshot,
        regimes=regime or [],
        out=out_folder,
        form=form.value,
        base=base_model,
        approximate=approximate,
    )
    if as_json:
        print(orjson.dumps(exported, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    else:
        out.print(offline.export_table(exported))
        out.print(f"written to {out_folder}", markup=False, highlight=False)


@app.command()
def gateway(
    published: Annotated[
        str,
        typer.Option(help="The published folder, or its URL in an object store.", show_default=False, metavar="FOLDER"),
    ],
    upstream: Annotated[
        list[str] | None, typer.Option(help="URL of a model server; may be repeated.", metavar="URL")
    ] = None,
    upstream_dns: Annotated[
        str | None, typer.Option(help="Model servers at every address of a host.", metavar="HOST:PORT")
    ] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="Model servers load a published version when it is asked for.")
    ] = False,
    canary: Annotated[
        str, typer.Option(help="Share of requests that the newest publication gets.", metavar="PERCENT")
    ] = "100%",
    host: Annotated[
        str, typer.Option(help="Address to bind; any other than loopback needs a token and TLS.", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to bind; 0 takes a free one.", metavar="N", parser=number(0, 65535))
    ] = 8084,
    name: Annotated[
        list[str] | None, typer.Option(help="A further name accepted in the Host header.", metavar="HOST")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that clients must send.", metavar="FILE")
    ] = None,
    upstream_token_file: Annotated[
        Path | None, typer.Option(help="File with the bearer token that the model servers require.", metavar="FILE")
    ] = None,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Send that token over plain HTTP to other machines, too.")
    ] = False,
    tls_certfile: Annotated[Path | None, typer.Option(help="PEM certificate chain.", metavar="FILE")] = None,
    tls_keyfile: Annotated[Path | None, typer.Option(help="PEM private key.", metavar="FILE")] = None,
    timeout: Annotated[
        float,
        typer.Option(
            help="Maximum seconds between two parts of a model server's response.",
            metavar="SECONDS",
            parser=number(1.0, 2e6),
        ),
    ] = 600.0,
) -> None:
    """Route OpenAI requests to a fleet of model servers, each to its regime's adapter.

    Needs no model and no torch. After SIGTERM it finishes the requests in flight.
    """
    signals = StopSignals()
    with signals.installed():
        from streamlearn.cli.gateway import gateway_settings, run_gateway  # noqa: PLC0415

        run_gateway(
            gateway_settings(
                published=published,
                upstreams=tuple(upstream or ()),
                upstream_dns=upstream_dns,
                on_demand=on_demand,
                canary=canary,
                host=host,
                port=port,
                names=tuple(name or ()),
                token_file=token_file,
                upstream_token_file=upstream_token_file,
                allow_plaintext=allow_plaintext,
                tls_certfile=tls_certfile,
                tls_keyfile=tls_keyfile,
                timeout_s=timeout,
            ),
            signals,
        )


@app.command()
def status(
    config: ConfigOption,
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
) -> None:
    """Show the running daemon's progress, regimes, shifts and forgetting."""
    from streamlearn.cli import status as overview  # noqa: PLC0415

    if as_json:
        responses = overview.fetch(load_settings(config))
        print(orjson.dumps(responses, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    elif watch:
        overview.watch(load_settings(config), out)
    else:
        out.print(overview.tables(overview.fetch(load_settings(config))))


@app.command("check-config")
def check_config(
    config: ConfigOption,
    sample: Annotated[
        int,
        typer.Option(
            help="Also read this many records and show what would be learned of each.", parser=natural, metavar="N"
        ),
    ] = 0,
) -> None:
    """Check a configuration without starting anything.

    Exits 78 and names what is wrong if `run` would refuse it. --sample reads records from the beginning of the topic or
    file, shows each as text with what is learned between ⟦ and ⟧, and counts what would be refused and why.
    """
    settings = load_settings(config)
    from streamlearn.cli.doctor import check_backbone  # noqa: PLC0415 - imports torch

    result = without_credentials(f"{config}: {check_backbone(settings)}")
    out.print(result, markup=False, highlight=False, soft_wrap=True)
    if sample:
        from streamlearn.cli.sample import sample as read_sample  # noqa: PLC0415

        for text in read_sample(settings, sample):
            out.print(text, soft_wrap=True)


@app.command()
def doctor(
    config: ConfigOption,
    step: Annotated[
        bool, typer.Option("--step", help="Also load the model and take the largest step, to see whether it fits.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check everything a start needs: model, state folder, disk, source, ports.

    Changes nothing. Exits with the code that `run` would exit with. --json prints one object per finding.
    """
    settings = load_settings(config)
    from streamlearn.cli.doctor import Doctor, finding_table  # noqa: PLC0415 - imports torch

    configure_logging("error")  # the findings report the rest
    code = 0
    for finding in Doctor(settings, step).examine():
        code = code or finding.exit_code
        if as_json:
            print(orjson.dumps(finding).decode())  # noqa: T201
        else:
            out.print(finding_table(finding))
    raise typer.Exit(code)


@app.command("version")
def show_versions() -> None:
    """Print the versions of streamlearn and of the packages that decide its results."""
    for name, version in {**versions(), "python": sys.version.split()[0]}.items():
        out.print(f"{name} {version}", markup=False, highlight=False)
