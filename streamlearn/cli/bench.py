"""The bench commands: one per measurement; each imports its module when it runs."""

from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from streamlearn.cli.options import JsonOption, err
from streamlearn.errors import UsageError

app = typer.Typer(help="Run measurements and print their results.", no_args_is_help=True)

DataOption = Annotated[Path, typer.Option(help="Folder of SuperNI task files.", metavar="FOLDER")]
OthersOption = Annotated[
    Path,
    typer.Option(
        help="File of texts of other tasks: {text, source}, JSON Lines, gzip.",
        metavar="FILE",
        show_default="superni_other.jsonl.gz in ../shared/data/pretrain",
    ),
]
OTHERS = Path("../shared/data/pretrain/superni_other.jsonl.gz")
PlotOption = Annotated[Path | None, typer.Option(help="Also plot to this file: .png, .pdf or .svg.", metavar="FILE")]
TasksOption = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of task files; every named suite needs one. Repeatable.", metavar="FOLDER"),
]
BackboneOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a causal language model; by default the profile's builtin model.", metavar="FOLDER"),
]
ProfileOption = Annotated[
    str, typer.Option(help="Profile: nano, smollm2, or a file that `bench search` wrote.", metavar="NAME|FILE")
]
RecordsOption = Annotated[
    int | None, typer.Option(min=1, help="Maximum training records per task; by default the profile's.")
]
EvaluatedOption = Annotated[int, typer.Option(min=1, help="Maximum scored records per task.")]
ReuseOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder for what the layers below adapter.first_layer compute, the same in all runs.",
        metavar="FOLDER",
    ),
]
SideBySideOption = Annotated[int, typer.Option(min=1, help="Parallel runs; they share the cores evenly, or one GPU.")]


class SplitName(Enum):
    """The records that a run is scored on."""

    TEST = "test"
    DEVELOPMENT = "development"


@app.command("speed")
def measure_speed(
    as_json: JsonOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median is reported.")] = 7,
    backbone: Annotated[
        Path | None, typer.Option(help="Also measure the causal language model in this folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Measure training speed in tokens per second, and what a step takes.

    Compares whole training steps of the adapters, of the frozen backbone and of the daemon.
    """
    from benchmarks import speed  # noqa: PLC0415

    speed.report(rounds=rounds, folder=backbone, as_json=as_json)


@app.command("distributed")
def measure_distributed(
    as_json: JsonOption = False,
    processes: Annotated[int, typer.Option(min=2, help="Processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(min=2, help="Pairs of steps whose speeds are compared.")] = 24,
    backbone: Annotated[
        Path | None,
        typer.Option(help="Folder of a causal language model; by default the bundled one.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Compare training in several processes with training in one, on the CPU.

    Whether they learn the same, and how much faster they are.
    """
    from benchmarks import distributed  # noqa: PLC0415

    distributed.report(processes=processes, rounds=rounds, folder=backbone, as_json=as_json)


@app.command("quantization")
def measure_quantization(
    as_json: JsonOption = False,
    backbone: Annotated[
        Path | None, typer.Option(help="Folder of a causal language model; by default nano.", metavar="FOLDER")
    ] = None,
    records: Annotated[int, typer.Option(min=8, help="Records of the bundled sample that a run learns.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with each way to store the backbone's weights.")] = 2,
    plot: PlotOption = None,
) -> None:
    """Measure what a quantised backbone costs in loss, and what it saves in memory.

    Each run is a process of its own.
    """
    from benchmarks import quantized_loss  # noqa: PLC0415

    quantized_loss.report(backbone=backbone, records=records, seeds=seeds, as_json=as_json, plot=plot)


@app.command("memory")
def measure_memory(
    as_json: JsonOption = False,
    backbone: Annotated[
        Path | None, typer.Option(help="Also measure the causal language model in this folder.", metavar="FOLDER")
    ] = None,
) -> None:
    """Measure the memory of the largest step of several configurations, beside what `doctor` estimates for it.

    Each configuration is measured in a process of its own.
    """
    from benchmarks import memory_table  # noqa: PLC0415

    memory_table.report(backbone=backbone, as_json=as_json)


@app.command("gateway")
def measure_gateway(
    as_json: JsonOption = False,
    seconds: Annotated[float, typer.Option(min=1, help="Length of the measurement, each way.")] = 20.0,
    rate: Annotated[float, typer.Option(min=1, help="Requests per second.")] = 50.0,
    keep_awake: Annotated[bool, typer.Option("--keep-awake", help="Let no processor go idle meanwhile.")] = False,
) -> None:
    """Measure what the gateway adds to a request, and its start.

    A stub in a process of its own answers for the model servers.
    """
    from benchmarks import gateway  # noqa: PLC0415

    gateway.report(seconds=seconds, requests_per_s=rate, keep_awake=keep_awake, as_json=as_json)


@app.command("flood")
def measure_flood(
    as_json: JsonOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of one quiet and one flooded interval.")] = 5,
    interval_s: Annotated[float, typer.Option(min=1, help="Length of an interval, seconds.")] = 15.0,
) -> None:
    """Measure health checks and training under a flood of connections.

    220 clients hold connections open or send requests a few bytes at a time.
    """
    from benchmarks import flood  # noqa: PLC0415

    flood.report(rounds=rounds, interval_s=interval_s, as_json=as_json)


@app.command("detect")
def measure_detection(
    as_json: JsonOption = False,
    data: DataOption = Path("../shared/data/superni"),
    seeds: Annotated[int, typer.Option(min=1, help="Streams of each kind and prompt, one per seed.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Use short streams of few records, as a smoke test.")] = False,
    answers: Annotated[bool, typer.Option(help="Also train on tasks with swapped labels. Takes minutes.")] = True,
    others: Annotated[
        Path | None, typer.Option(help="Also measure on the texts of other tasks in this file.", metavar="FILE")
    ] = None,
    records: Annotated[
        int, typer.Option(min=1000, help="With --others: stationary records per order and level. 1,000 take 0.2 s.")
    ] = 100_000,
    length: Annotated[
        int, typer.Option(min=1000, help="With --others: of them, records of one stream, all of one task.")
    ] = 1000,
    asked: Annotated[
        list[float] | None, typer.Option(help="With --others: asked false alarms per million. Repeatable.")
    ] = None,
) -> None:
    """Measure shift detection: delay, misses, false alarms.

    Also recurrences, the regime assigned to each record, and concept drift (swapped labels).
    """
    from benchmarks import detect  # noqa: PLC0415

    on_others = None
    if others is not None:
        on_others = detect.Others(others, records, min(length, records), tuple(asked or (1.0,)))
    detect.report(data=data, seeds=seeds, as_json=as_json, quick=quick, answers=answers, others=on_others)


@app.command("mixtures")
def measure_mixtures(
    as_json: JsonOption = False,
    data: DataOption = Path("../shared/data/superni"),
    others: OthersOption = OTHERS,
    seeds: Annotated[int, typer.Option(min=1, help="Streams of each kind and prompt, one per seed.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Use few, short streams, as a smoke test.")] = False,
) -> None:
    """Measure how well producers are told apart that are mixed from the first record, or come in bursts.

    Uses no model, only its tokenizer.
    """
    from benchmarks import mixtures  # noqa: PLC0415

    mixtures.report(data=data, others=others, seeds=seeds, as_json=as_json, quick=quick)


@app.command("abstain")
def measure_abstention(
    as_json: JsonOption = False,
    data: DataOption = Path("../shared/data/superni"),
    others: OthersOption = OTHERS,
    backbone: Annotated[
        Path | None,
        typer.Option(help="Folder of a model whose tokenizer is used, by default nano.", metavar="FOLDER"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use few, short streams, as a smoke test.")] = False,
) -> None:
    """Measure novelty detection: requests of tasks in the stream told apart from those of other tasks.

    Uses no model, only its tokenizer.
    """
    from benchmarks import abstain  # noqa: PLC0415

    abstain.report(data=data, others=others, backbone=backbone, as_json=as_json, quick=quick)


@app.command("regimes")
def measure_regimes(
    as_json: JsonOption = False,
    others: OthersOption = OTHERS,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks, one after another.")] = 300,
    records: Annotated[int, typer.Option(min=8, help="Records of a task, and again of its return.")] = 30,
    backbone: BackboneOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws tasks and records.")] = 0,
    plot: PlotOption = None,
) -> None:
    """Measure what many regimes cost: speed, memory, snapshots; and how many returns are recognised.

    The daemon learns the tasks, then all return once.
    """
    from benchmarks.many_regimes import regime_costs  # noqa: PLC0415

    regime_costs.report(
        others=others, tasks=tasks, records=records, backbone=backbone, seed=seed, as_json=as_json, plot=plot
    )


@app.command("returns")
def measure_returns(
    as_json: JsonOption = False,
    others: OthersOption = OTHERS,
    tasks: Annotated[int, typer.Option(min=2, help="Tasks, one after another.")] = 300,
    records: Annotated[
        list[int] | None,
        typer.Option(min=8, help="Records of a task each time; may be repeated. By default 24, 48 and 60."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Draws tasks and records.")] = 0,
    bare: Annotated[bool, typer.Option("--bare", help="Leave the tasks' definitions out of the prompts.")] = False,
    learned: Annotated[
        bool, typer.Option("--learn", help="Learn from the records, and check returns by their losses.")
    ] = False,
    backbone: Annotated[
        Path | None,
        typer.Option(help="With --learn: folder of a causal language model; else the bundled one.", metavar="FOLDER"),
    ] = None,
) -> None:
    """Measure how many returns of tasks are recognised, and how many new tasks are taken for known ones.

    Assigns the records of `bench regimes` to regimes by their inputs alone, unless they are learned.
    """
    from benchmarks.many_regimes import returns  # noqa: PLC0415

    returns.report(
        others=others,
        tasks=tasks,
        records=records or [24, 48, 60],
        seed=seed,
        bare=bare,
        learned=learned,
        backbone=backbone,
        as_json=as_json,
    )


@app.command("mot")
def measure_mot(
    as_json: JsonOption = False,
    plot: PlotOption = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per model. Step sizes are tuned on other seeds.")] = 3,
) -> None:
    """Reproduce the claims of the MoT paper on its synthetic data.

    Convergence rates, error floors and routing. Takes minutes.
    """
    from benchmarks.mot import benchmark  # noqa: PLC0415

    benchmark.report(num_seeds=seeds, as_json=as_json, plot=plot)


@app.command("learn")
def measure_forgetting(
    out: Annotated[Path, typer.Option(help="Folder for the results, one JSON file per run.", metavar="FOLDER")],
    data: TasksOption = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="Name of a suite, or a folder of task files. Repeatable.", metavar="SUITE"),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="YAML list of suites, methods and seeds, made in its order, instead of --suite, --method and --seeds.",
            metavar="FILE",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method or ablation to run; all methods if absent. Repeatable.", metavar="NAME"),
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Run the default method with each mechanism removed in turn.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method. A seed draws the records and their order.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed; the others follow it.")] = 0,
    backbone: BackboneOption = None,
    profile: ProfileOption = "nano",
    split: Annotated[
        SplitName,
        typer.Option(help="Records that are scored. Whatever is still to be chosen is chosen on development."),
    ] = SplitName.TEST,
    records_per_task: RecordsOption = None,
    evaluated_per_task: EvaluatedOption = 50,
    order: Annotated[
        list[str] | None, typer.Option(help="Task of a folder, in training order. Repeatable.", metavar="TASK")
    ] = None,
    reuse: ReuseOption = None,
    side_by_side: SideBySideOption = 1,
) -> None:
    """Compare how much methods forget on a sequence of tasks.

    Runs are made in the order of the suites, then of the seeds. Finished runs are kept: started again with the same
    folder, it continues. A run that fails does not stop the others; its error is kept beside its result.

    A folder of task files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz, one record per line: {"id", "task",
    "definition", "input", "output"} or {"id", "task", "prompt", "answer"}. The SuperNI files are those of
    github.com/circle-hit/SAPT, the TRACE files those of github.com/BeyonderXX/TRACE.
    """
    from benchmarks.learn.job import RunConditions  # noqa: PLC0415
    from benchmarks.learn.methods import ABLATIONS, METHODS  # noqa: PLC0415
    from benchmarks.learn.plan import Part, Plan, carry_out, read_plan  # noqa: PLC0415

    if (plan is None) == (not suite):
        raise UsageError("bench learn: give either --suite or --plan")
    if plan and (method or ablations):
        raise UsageError("--plan: names the methods itself; remove --method and --ablations")
    methods = method or (["streamlearn", *ABLATIONS] if ablations else list(METHODS))
    seeds_of_all = tuple(range(first_seed, first_seed + seeds))
    parts = read_plan(plan) if plan else [Part(tuple(suite or ()), tuple(methods), seeds_of_all)]
    conditions = RunConditions(
        data=tuple(data or ()),
        out=out,
        profile=profile,
        backbone=backbone,
        split=split.value,
        records=records_per_task,
        evaluated=evaluated_per_task,
        order=tuple(order or ()),
        reuse=reuse,
    )
    carry_out(Plan(parts, conditions), side_by_side=side_by_side, console=err)


@app.command("search")
def search_profile(
    suite: Annotated[str, typer.Option(help="Name of a suite, or a folder of task files.", metavar="SUITE")],
    out: Annotated[Path, typer.Option(help="Folder for the trials, one JSON file per run.", metavar="FOLDER")],
    write: Annotated[Path, typer.Option(help="The profile to write.", metavar="FILE")],
    data: TasksOption = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="The table to write, and a JSON file beside it; by default search.md in --out.", metavar="FILE"
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method to search for; all that are trained if absent. Repeatable.", metavar="NAME"),
    ] = None,
    backbone: BackboneOption = None,
    profile: ProfileOption = "nano",
    records_per_task: RecordsOption = None,
    evaluated_per_task: EvaluatedOption = 50,
    reuse: ReuseOption = None,
    side_by_side: SideBySideOption = 1,
) -> None:
    """Choose a profile for a backbone: prompts, adapter layers, and every method's learning rate and strength.

    Every method gets the same seven trials, and up to three more in a direction in which the best value is the last.
    They are scored on development records, which no result uses; no test file is opened. Finished trials are kept:
    started again with the same folder, it continues.
    """
    from benchmarks.learn.job import RunConditions  # noqa: PLC0415
    from benchmarks.learn.processes import RunFailedError, make_runs  # noqa: PLC0415
    from benchmarks.learn.search import SEARCHED, Search  # noqa: PLC0415
    from benchmarks.learn.search_table import write_search  # noqa: PLC0415

    conditions = RunConditions(
        tuple(data or ()), out, profile, backbone, "development", records_per_task, evaluated_per_task, reuse=reuse
    )
    runs = partial(make_runs, side_by_side=side_by_side, console=err)
    found = Search(suite, tuple(method or SEARCHED), conditions, runs).run()
    write.parent.mkdir(parents=True, exist_ok=True)
    write.write_bytes(found.profile.to_json())
    write_search(found, table or out / "search.md")
    err.print(f"chosen: {write}; trials: {table or out / 'search.md'}", highlight=False)
    if found.failed:
        raise RunFailedError.of(found.failed)


@app.command("report")
def write_report(
    runs: Annotated[Path, typer.Argument(help="Folder that `bench learn` wrote to.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for the report.", metavar="FOLDER")] = Path("report"),
) -> None:
    """Write tables with 95 % intervals, plots and an HTML page from the results of `bench learn`."""
    from benchmarks.learn import report  # noqa: PLC0415

    report.report(runs, out, err)
