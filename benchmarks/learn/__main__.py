"""Compare how much methods forget on a sequence of tasks, choose their settings, and report.

    python -m benchmarks.learn run --suite superni-1 --data ../shared/data/superni --out build/runs
    python -m benchmarks.learn search --suite superni-1-short --data ../shared/data/superni --out build/trials \
        --write build/profile.json
    python -m benchmarks.learn report build/runs --out build/report
    python -m benchmarks.learn run --suite commits --data ../shared/data/natural --out build/commits --without-answers
    python -m benchmarks.learn report build/commits --out build/report
    python -m benchmarks.learn rescore --suite superni-1 --data ../shared/data/superni --out build/runs
    python -m benchmarks.learn report docs/evidence/runs.tar.xz --member runs --out docs/evidence

Runs are made in the order of the suites, then of the seeds. Finished runs are kept: started again with the same folder,
a command continues. A run that fails does not stop the others.

A folder of task files holds NAME.train.jsonl.gz and NAME.test.jsonl.gz, one record per line: {"id", "task",
"definition", "input", "output"} or {"id", "task", "prompt", "answer"}. The SuperNI files are those of
github.com/circle-hit/SAPT, the TRACE files those of github.com/BeyonderXX/TRACE.
"""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.learn.jobs import Part, RunConditions, RunJob, jobs_of, make_runs, read_plan
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.rescore import rescore_suite
from benchmarks.learn.search import SEARCHED, Search
from benchmarks.measuring import MeasurementError, command, natural, positive
from streamlearn.errors import UsageError


def run(given: argparse.Namespace) -> None:
    """Make the missing runs; a run that is interrupted is made by the next call."""
    if (given.plan is None) == (not given.suite):
        raise UsageError("run: give either --suite or --plan")
    if given.plan and (given.method or given.ablations):
        raise UsageError("--plan: names the methods itself; remove --method and --ablations")
    methods = given.method or (["streamlearn", *ABLATIONS] if given.ablations else list(METHODS))
    seeds = list(range(given.first_seed, given.first_seed + given.seeds))
    parts = read_plan(given.plan) if given.plan else [Part(suites=given.suite, methods=methods, seeds=seeds)]
    jobs = jobs_of(parts, _conditions(given))
    _require_none(make_runs(jobs, side_by_side=given.side_by_side))


def search(given: argparse.Namespace) -> None:
    """Choose every method's learning rate and strength for a backbone."""
    runs = partial(make_runs, side_by_side=given.side_by_side)
    searched = Search(given.suite[0], given.method or SEARCHED, _conditions(given), runs, is_around=given.around)
    profile = searched.run()
    given.write.parent.mkdir(parents=True, exist_ok=True)
    given.write.write_bytes(profile.to_json())
    table = given.table or given.out / "search.md"
    searched.write_record(table)
    print(f"chosen: {given.write}; trials: {table}")
    _require_none(searched.failed)


def report(given: argparse.Namespace) -> None:
    """Write tables with 95 % intervals, and a plot."""
    from benchmarks.learn import report as reporting  # noqa: PLC0415 - workers need no report

    for suite in reporting.report(given.runs, given.out, given.member):
        print(given.out / f"{suite}.md")


def rescore(given: argparse.Namespace) -> None:
    """Score the answers of finished runs again by today's metrics."""
    conditions = _conditions(given)
    conditions.check(given.suite, [], [])
    for suite in given.suite:
        print(f"{suite}: {rescore_suite(suite, conditions)} runs")


def _require_none(failed: list[RunJob]) -> None:
    if failed:
        titles = "\n".join(f"  {job.title}" for job in failed)
        raise MeasurementError(f"{len(failed)} of the runs failed; start again to repeat them\n{titles}")


def _conditions(given: argparse.Namespace) -> RunConditions:
    packaged = not Path(given.profile).is_file()
    return RunConditions(
        data=tuple(str(folder.resolve()) for folder in given.data),
        out=str(given.out.resolve()),
        profile=given.profile if packaged else str(Path(given.profile).resolve()),
        backbone=str(given.backbone.resolve()) if given.backbone else None,
        split=given.split,
        records=given.records_per_task,
        evaluated=given.evaluated_per_task,
        answered=not given.without_answers,
        order=tuple(given.order),
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--suite", action="append", default=[], help="name of a suite, or a folder of task files; repeatable")
    add("--data", type=Path, nargs="+", default=[], help="folders of task files; every named suite needs one")
    add("--out", type=Path, required=True, help="folder for the results, one JSON file per run")
    add("--method", action="append", help="method or ablation; repeatable; all methods if absent")
    add("--backbone", type=Path, help="folder of a causal language model; by default the profile's builtin model")
    add("--profile", default="nano", help="nano, smollm2, or a file that `search` wrote")
    add("--records-per-task", type=positive, help="maximum training records per task; by default the profile's")
    add("--evaluated-per-task", type=positive, default=50, help="maximum scored records per task")
    add("--order", nargs="+", default=[], help="tasks of a folder, in training order")
    add("--without-answers", action="store_true", help="score losses only: free answers take most of an evaluation")
    add("--side-by-side", type=positive, default=1, help="parallel runs; they share the cores evenly, or one GPU")
    add("--split", choices=["test", "development"], default="test", help="records that are scored")
    verb = verbs.add_parser("run", parents=[common], help="make runs")
    verb.add_argument("--plan", type=Path, help="YAML list of suites, methods and seeds, see benchmarks.learn.jobs")
    verb.add_argument("--ablations", action="store_true", help="the default method with each mechanism removed in turn")
    verb.add_argument(
        "--seeds", type=positive, default=3, help="runs per method; a seed draws the records and their order"
    )
    verb.add_argument("--first-seed", type=natural, default=0, help="the first seed; the others follow it")
    verb.set_defaults(action=run)
    verb = verbs.add_parser("search", parents=[common], help="choose a profile on development records")
    verb.add_argument("--write", type=Path, required=True, help="the profile to write")
    verb.add_argument(
        "--around", action="store_true", help="only half, once and twice the rate that --profile has for a method"
    )
    verb.add_argument("--table", type=Path, help="the table to write; by default search.md in --out")
    verb.set_defaults(action=search)
    verb = verbs.add_parser("rescore", parents=[common], help="score the answers of finished runs in --out again")
    verb.set_defaults(action=rescore)
    verb = verbs.add_parser("report", help="write tables and plots")
    verb.add_argument("runs", type=Path, help="folder that `run` wrote to, or an archive of such folders")
    verb.add_argument("--member", default="", help="folder within the archive")
    verb.add_argument("--out", type=Path, default=Path("report"), help="folder for the report")
    verb.set_defaults(action=report)
    return parser


def main() -> None:
    given = options().parse_args()
    given.action(given)


if __name__ == "__main__":
    command(main)
