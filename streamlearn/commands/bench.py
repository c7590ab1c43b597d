"""The bench commands: one per measurement; each imports its module when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from streamlearn.commands.options import JsonOption, err

app = typer.Typer(help="Run measurements and print their results.", no_args_is_help=True)

DataOption = Annotated[Path, typer.Option(help="Folder of SuperNI task files.", metavar="FOLDER")]


@app.command("speed")
def measure_speed(
    as_json: JsonOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the median is reported.")] = 7,
) -> None:
    """Measure training speed in tokens per second.

    Compares whole training steps of the adapters, of the frozen backbone (the lower bound) and of the daemon.
    """
    from streamlearn.bench import speed  # noqa: PLC0415

    speed.report(rounds=rounds, as_json=as_json)


@app.command("flood")
def measure_flood(
    as_json: JsonOption = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of one quiet and one flooded interval.")] = 5,
    interval_s: Annotated[float, typer.Option(min=1, help="Length of an interval, seconds.")] = 15.0,
) -> None:
    """Measure health checks and training under a flood of connections.

    220 clients hold connections open or send requests a few bytes at a time.
    """
    from streamlearn.bench import flood  # noqa: PLC0415

    flood.report(rounds=rounds, interval_s=interval_s, as_json=as_json)


@app.command("detect")
def measure_detection(
    as_json: JsonOption = False,
    data: DataOption = Path("../shared/data/superni"),
    seeds: Annotated[int, typer.Option(min=1, help="Streams of each kind and prompt, one per seed.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Use short streams of few records, as a smoke test.")] = False,
    answers: Annotated[bool, typer.Option(help="Also train on tasks with swapped labels. Takes minutes.")] = True,
) -> None:
    """Measure shift detection: delay, misses, false alarms.

    Also recurrences, the regime assigned to each record, and concept drift (swapped labels).
    """
    from streamlearn.bench import detect  # noqa: PLC0415

    detect.report(data=data, seeds=seeds, as_json=as_json, quick=quick, answers=answers)


@app.command("mot")
def measure_mot(
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also plot to this file: .png, .pdf or .svg.", metavar="FILE")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per model. Step sizes are tuned on other seeds.")] = 3,
) -> None:
    """Reproduce the claims of the MoT paper on its synthetic data.

    Convergence rates, error floors and routing. Takes minutes.
    """
    from streamlearn.bench.mot import benchmark  # noqa: PLC0415

    benchmark.report(num_seeds=seeds, as_json=as_json, plot=plot)


@app.command("learn")
def measure_forgetting(
    suite: Annotated[
        list[str], typer.Option(help="Name of a suite, or a folder of task files. Repeatable.", metavar="SUITE")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results, one JSON file per run.", metavar="FOLDER")],
    data: Annotated[
        list[Path], typer.Option(help="Folder of task files for the named suites. Repeatable.", metavar="FOLDER")
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(help="Method or ablation to run; all methods if absent. Repeatable.", metavar="NAME"),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs per method. A seed draws the records and their order.")] = 3,
    records_per_task: Annotated[int, typer.Option(min=1, help="Maximum training records per task.")] = 200,
    tests_per_task: Annotated[int, typer.Option(min=1, help="Maximum test records per task.")] = 50,
    order: Annotated[
        list[str] | None, typer.Option(help="Task of a folder, in training order. Repeatable.", metavar="TASK")
    ] = None,
    ablations: Annotated[
        bool, typer.Option("--ablations", help="Run the default method with each mechanism removed in turn.")
    ] = False,
    side_by_side: Annotated[int, typer.Option(min=1, help="Parallel runs; they share the cores evenly.")] = 1,
) -> None:
    """Compare how much methods forget on a sequence of tasks.

    Finished runs are kept: started again with the same folder, it continues.

    A folder of task files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz, one record per line: {"id", "task",
    "definition", "input", "output"} or {"id", "task", "prompt", "answer"}. The SuperNI files are those of
    github.com/circle-hit/SAPT, the TRACE files those of github.com/BeyonderXX/TRACE.
    """
    from streamlearn.bench.learn.methods import ABLATIONS, METHODS  # noqa: PLC0415
    from streamlearn.bench.learn.plan import Plan, carry_out  # noqa: PLC0415

    methods = method or (["streamlearn", *ABLATIONS] if ablations else list(METHODS))
    plan = Plan(suite, methods, range(seeds), data, out, records_per_task, tests_per_task, order or ())
    carry_out(plan, side_by_side=side_by_side, console=err)


@app.command("report")
def write_report(
    runs: Annotated[Path, typer.Argument(help="Folder that `bench learn` wrote to.", exists=True, file_okay=False)],
    out: Annotated[Path, typer.Option(help="Folder for the report.", metavar="FOLDER")] = Path("report"),
) -> None:
    """Write tables (mean and spread), plots and an HTML page from the results of `bench learn`."""
    from streamlearn.bench.learn import report  # noqa: PLC0415

    report.report(runs, out, err)
