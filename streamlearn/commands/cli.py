"""The command line: each command checks its arguments, calls one room and prints. Heavy imports wait for it."""

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console

from streamlearn.errors import StreamlearnError, UsageError
from streamlearn.events import configure_logging
from streamlearn.runtime.signals import StopSignals

if TYPE_CHECKING:
    from streamlearn.settings import Settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # records are decoded one by one; a pool only warns on fork

app = typer.Typer(
    help="Keep a frozen Hugging Face model learning from an endless stream of records.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
snapshots = typer.Typer(
    help="Look at the snapshots of a state folder. Safe beside a running daemon.", no_args_is_help=True
)
bench = typer.Typer(help="Measurements, one JSON object each.", no_args_is_help=True)
app.add_typer(snapshots, name="snapshots")
app.add_typer(bench, name="bench")

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Configuration file, YAML.", show_default=False)]
_USAGE = 2  # what the command-line library exits with; sysexits.h says 64
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Entry point: an error that we raise on purpose is one message and its exit code, never a traceback."""
    configure_logging("warning")  # to standard error; `run` sets its own
    try:
        app()
    except StreamlearnError as error:
        err.print(f"streamlearn: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except SystemExit as finished:
        sys.exit(UsageError.exit_code if finished.code == _USAGE else finished.code)


@app.command()
def run(
    config: ConfigOption,
    fresh: Annotated[bool, typer.Option(help="Set existing snapshots aside and start anew.")] = False,
    accept_config_change: Annotated[
        bool, typer.Option(help="Go on although learner, stream or seed settings differ from the snapshot's.")
    ] = False,
    segment_by: Annotated[
        str | None, typer.Option(help="Key in the records' meta that cuts the closing table; learning never sees it.")
    ] = None,
) -> None:
    """Run the daemon: learn from the stream until it ends or SIGTERM comes, then write a snapshot and exit 0."""
    signals = StopSignals()
    with signals.installed():  # before the import, which takes longer than all the rest of a start
        from streamlearn.commands.run import run_daemon  # noqa: PLC0415

        settings = _settings(config)
        run_daemon(settings, signals, fresh=fresh, accept_config_change=accept_config_change, segment_by=segment_by)
    gc.freeze()  # else the interpreter's last collection walks through all that was imported: 1.7 s of every stop


@app.command()
def feed(
    file: Annotated[Path, typer.Argument(help="JSONL file, gzip when it ends in .gz.", exists=True, dir_okay=False)],
    topic: Annotated[str, typer.Option(help="Topic to write to; it must exist.")],
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Take the cluster from source.kafka of this file.")
    ] = None,
    bootstrap_servers: Annotated[
        str | None, typer.Option(help="host:port of a local broker without TLS, instead of --config.")
    ] = None,
) -> None:
    """Put the lines of a JSONL file into a topic, one record each, acknowledged by all replicas."""
    from rich.progress import Progress  # noqa: PLC0415

    from connectors.kafka.feed import feed as send  # noqa: PLC0415
    from connectors.lines import read_lines  # noqa: PLC0415

    cluster = _cluster(config, bootstrap_servers)
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task(f"{file.name} to {topic}", total=sum(1 for _ in read_lines(file)))
        sent = send(cluster, topic, read_lines(file), report=lambda done: progress.update(task, completed=done))
    out.print(f"{sent} records acknowledged by {topic}", markup=False, highlight=False)


@app.command("eval")
def evaluate(
    file: Annotated[Path, typer.Argument(help="Records with known answers, JSONL.", exists=True, dir_okay=False)],
    config: ConfigOption,
    snapshot: Annotated[
        str | None, typer.Option(help="Evaluate this snapshot (or `newest`) instead of asking the running daemon.")
    ] = None,
    generate: Annotated[bool, typer.Option(help="Also generate answers: exact match and ROUGE-L.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest generated answer, tokens.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Loss, perplexity and accuracy on a file of records, from the running daemon or from a snapshot."""
    from streamlearn.commands import evaluate as room  # noqa: PLC0415

    settings = _settings(config)
    examples = room.read_examples(file)
    if snapshot is None:
        result = room.ask_daemon(settings, examples, generate=generate, max_new_tokens=max_new_tokens)
    else:
        result = room.from_snapshot(settings, snapshot, examples, generate=generate, max_new_tokens=max_new_tokens)
    if as_json:
        print(result.model_dump_json(indent=2))  # noqa: T201 - JSON goes out as it is, not through a renderer
    else:
        out.print(room.table(result))


@app.command()
def status(
    config: ConfigOption,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the daemon answered as JSON.")] = False,
) -> None:
    """What the running daemon does: progress, regimes, shifts, and what was forgotten."""
    from streamlearn.commands import status as overview  # noqa: PLC0415

    answers = overview.ask_all(_settings(config))
    if as_json:
        print(orjson.dumps(answers, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
    else:
        out.print(overview.tables(answers))


@snapshots.command("list")
def snapshots_list(config: ConfigOption) -> None:
    """One line a snapshot, newest last."""
    from rich.table import Table  # noqa: PLC0415

    table = Table("snapshot", "step", "written", "bytes", "position", box=None, pad_edge=False)
    for info in _store(config).infos():
        table.add_row(info.name, str(info.step), info.created_at, f"{info.bytes:,}", str(info.position))
    out.print(table)


@snapshots.command("show")
def snapshots_show(
    config: ConfigOption, name: Annotated[str, typer.Argument(help="Snapshot, for example 00000042.")]
) -> None:
    """The manifest of one snapshot, verified, as JSON."""
    print(_store(config).load(name).manifest.model_dump_json(indent=2, by_alias=True))  # noqa: T201


@snapshots.command("verify")
def snapshots_verify(
    config: ConfigOption, name: Annotated[str | None, typer.Argument(help="Snapshot; all when absent.")] = None
) -> None:
    """Compare every file of a snapshot with its manifest; exit 74 when one is damaged."""
    store = _store(config)
    damaged: StreamlearnError | None = None
    for each in [name] if name else store.names():
        try:
            store.verify(each)
        except StreamlearnError as error:
            err.print(f"{each}  damaged: {error}", style="red", markup=False, highlight=False)
            damaged = error
        else:
            out.print(f"{each}  whole", markup=False, highlight=False)
    if damaged:
        raise typer.Exit(damaged.exit_code)


@app.command("check-config")
def check_config(config: ConfigOption) -> None:
    """Check a configuration without starting anything; exit 78 with what is wrong."""
    from streamlearn.commands.check_config import check_backbone  # noqa: PLC0415

    settings = _settings(config)
    out.print(f"{config}: {check_backbone(settings)}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(
    config: ConfigOption,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding.")] = False,
) -> None:
    """Look at everything that a start needs, and say what to do; exit with the code that a start would."""
    from streamlearn.commands.doctor import Doctor, row  # noqa: PLC0415

    configure_logging("error")  # a finding says it better
    code = 0
    for finding in Doctor(_settings(config)).examine():
        code = code or finding.exit_code
        if as_json:
            print(orjson.dumps(finding).decode())  # noqa: T201
        else:
            out.print(row(finding))
    raise typer.Exit(code)


@bench.command("speed")
def bench_speed(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median is reported.")] = 7,
) -> None:
    """Tokens per second of whole training steps: adapters against each other, the floor, and the daemon."""
    from streamlearn.bench import speed  # noqa: PLC0415

    speed.report(rounds=rounds, as_json=as_json)


@bench.command("flood")
def bench_flood(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Quiet and flooded stretches, in turns.")] = 5,
    stretch_s: Annotated[float, typer.Option(min=1, help="Length of a stretch, seconds.")] = 15.0,
) -> None:
    """Health and training while 220 strangers hold connections open and trickle requests."""
    from streamlearn.bench import flood  # noqa: PLC0415

    flood.report(rounds=rounds, interval_s=stretch_s, as_json=as_json)


@bench.command("detect")
def bench_detect(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    data: Annotated[Path, typer.Option(help="Folder of SuperNI task files.")] = Path("../shared/data/superni"),
    seeds: Annotated[int, typer.Option(min=1, help="Each seed makes one stream of every kind and prompt.")] = 5,
    quick: Annotated[bool, typer.Option(help="Short streams of few records: to see that it runs.")] = False,
    answers: Annotated[bool, typer.Option(help="Also learn tasks whose labels are exchanged: minutes.")] = True,
) -> None:
    """Shifts: delay, misses, false alarms, recurrences, whose regime each record is given, and exchanged answers."""
    from streamlearn.bench import detect  # noqa: PLC0415

    detect.report(data=data, seeds=seeds, as_json=as_json, quick=quick, answers=answers)


@bench.command("mot")
def bench_mot(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw it here: .png, .pdf or .svg.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every model; step sizes are chosen on other seeds.")] = 3,
) -> None:
    """The claims of the MoT paper on its synthetic data: rates, floors and routing; minutes."""
    from streamlearn.bench.mot import benchmark  # noqa: PLC0415

    benchmark.report(num_seeds=seeds, as_json=as_json, plot=plot)


@bench.command("learn")
def bench_learn(
    suite: Annotated[list[str], typer.Option(help="A suite's name, or a folder of task files; again for more.")],
    out: Annotated[Path, typer.Option(help="Folder for the runs, one JSON file each.")],
    data: Annotated[list[Path], typer.Option(help="Folder of task files that named suites draw from; again for more.")],
    method: Annotated[list[str] | None, typer.Option(help="A method or ablation; all methods unless given.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each method; a seed draws records and their order.")] = 3,
    records_per_task: Annotated[int, typer.Option(min=1, help="Training records of each task, at most.")] = 200,
    tests_per_task: Annotated[int, typer.Option(min=1, help="Test records of each task, at most.")] = 50,
    order: Annotated[list[str] | None, typer.Option(help="Tasks of a folder, in order; again for more.")] = None,
    ablations: Annotated[bool, typer.Option(help="Instead of the methods, each mechanism left out in turn.")] = False,
    side_by_side: Annotated[int, typer.Option(min=1, help="Runs at a time, each with its part of the cores.")] = 1,
) -> None:
    """Who forgets how much: methods learn a stream of tasks one after another. Stops and goes on where it was.

    A folder of task files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz, one record a line: {"id", "task",
    "definition", "input", "output"} or {"id", "task", "prompt", "answer"}. SuperNI's are those of the SAPT repository
    (github.com/circle-hit/SAPT), TRACE's of github.com/BeyonderXX/TRACE.
    """
    from streamlearn.bench.learn.methods import ABLATIONS, METHODS  # noqa: PLC0415
    from streamlearn.bench.learn.plan import Plan, carry_out  # noqa: PLC0415

    methods = method or (["streamlearn", *ABLATIONS] if ablations else list(METHODS))
    plan = Plan(suite, methods, range(seeds), data, out, records_per_task, tests_per_task, order or ())
    carry_out(plan, side_by_side=side_by_side, console=err)


@bench.command("report")
def bench_report(
    runs: Annotated[Path, typer.Argument(help="The folder that bench learn wrote to.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for tables, pictures and the page.")] = Path("report"),
) -> None:
    """Tables with mean and spread, pictures and an HTML page of what bench learn measured."""
    from streamlearn.bench.learn import report  # noqa: PLC0415

    report.report(runs, out, err)


@app.command("version")
def show_version() -> None:
    """Versions of what decides a result."""
    from streamlearn.runtime.model import versions  # noqa: PLC0415

    for name, number in {**versions(), "python": sys.version.split()[0]}.items():
        out.print(f"{name} {number}", markup=False, highlight=False)


def _settings(config: Path) -> "Settings":
    from streamlearn.settings import load  # noqa: PLC0415

    return load(config)


def _store(config: Path) -> Any:
    from streamlearn.snapshot.store import SnapshotStore  # noqa: PLC0415

    settings = _settings(config)
    return SnapshotStore(settings.state / "snapshots", keep=settings.snapshot.keep)


def _cluster(config: Path | None, bootstrap_servers: str | None) -> Any:
    from streamlearn.settings import KafkaSettings  # noqa: PLC0415

    if (config is None) == (bootstrap_servers is None):
        raise UsageError("feed needs exactly one of --config and --bootstrap-servers: the cluster to write to")
    if config is not None:
        kafka = _settings(config).source.kafka
        if kafka is None:
            raise UsageError(f"{config} has no source.kafka: feed writes to a Kafka topic")
        return kafka
    return KafkaSettings(bootstrap_servers=bootstrap_servers, topics=("unused",), security_protocol="PLAINTEXT")
