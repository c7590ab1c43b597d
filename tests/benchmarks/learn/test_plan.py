"""The order of the runs, and plans that are refused."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.learn import plan as planning
from benchmarks.learn.job import RunConditions, RunJob
from benchmarks.learn.methods import METHODS
from benchmarks.learn.plan import Part, Plan, carry_out, read_plan
from benchmarks.learn.processes import Outcome, RunFailedError
from streamlearn.errors import UsageError

ROOT = Path(__file__).parents[3]


def conditions(out: Path, **changes: object) -> RunConditions:
    return RunConditions(**{"data": (out,), "out": out, "records": 3, "evaluated": 2, **changes})  # type: ignore[arg-type]


def test_runs_are_made_in_the_order_of_the_parts(tmp_path: Path) -> None:
    """Within a part by suite, seed and method; a run that a later part names again keeps its first place."""
    parts = [Part(("trace", "long"), ("lora", "gem"), (0, 1)), Part(("long",), ("er", "lora"), (1,))]
    jobs = [(job.suite, job.seed, job.method) for job in Plan(parts, conditions(tmp_path)).jobs()]
    assert jobs[:4] == [("trace", 0, "lora"), ("trace", 0, "gem"), ("trace", 1, "lora"), ("trace", 1, "gem")]
    assert jobs[8:] == [("long", 1, "er")]


@pytest.mark.parametrize(
    ("part", "changes", "named"),
    [
        (Part(("trace",), ("lorra",), (0,)), {}, "--method lorra"),
        (Part(("nowhere",), ("lora",), (0,)), {}, "--suite nowhere"),
        (Part(("trace",), ("lora",), (0,)), {"data": ()}, "--suite trace: .* pass each with --data"),
        (Part(("trace",), ("lora",), (0,)), {"order": ("a",)}, "--order"),
        (Part(("trace",), ("lora",), (0,)), {"profile": "none"}, "--profile none"),
        (Part(("trace",), ("lora",), (0,)), {"profile": "smollm2"}, "--backbone: profile smollm2"),
        (Part(("trace",), ("lora",), (0,)), {"backbone": Path("nowhere")}, "--backbone nowhere"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path: Path, part: Part, changes: dict[str, object], named: str) -> None:
    """It is refused before any run; the message names the option."""
    with pytest.raises(UsageError, match=named):
        Plan([part], conditions(tmp_path, **changes)).check()


def test_a_folder_of_task_files_needs_no_other(tmp_path: Path) -> None:
    """`--data` is for the named suites."""
    Plan([Part((str(tmp_path),), ("lora",), (0,))], conditions(tmp_path, data=())).check()


def test_a_plans_file_names_suites_methods_and_seeds(tmp_path: Path) -> None:
    """Without methods, all are run."""
    file = tmp_path / "plan.yaml"
    file.write_text("- {suites: [trace], methods: [lora], seeds: [0, 2]}\n- {suites: [long], seeds: [1]}\n")
    assert read_plan(file) == [Part(("trace",), ("lora",), (0, 2)), Part(("long",), tuple(METHODS), (1,))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("suites: [a]", "expected a list of parts, found dict"),
        ("- suites: [a", "expected a YAML file"),
        ("- trace", "part 1: expected suites, methods and seeds, found 'trace'"),
        ("- {suites: [a], seeds: [0]}\n- {suite: [a], seeds: [0]}", "part 2: .* found suite"),
        ("- {suites: a, seeds: [0]}", "part 1: suites must be a list of str, found 'a'"),
        ("- {suites: [a], seeds: 3}", "part 1: seeds must be a list of int, found 3"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message has the number of the part."""
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_plan(file)


def test_the_plan_of_the_evidence_can_be_run(tmp_path: Path) -> None:
    """Its suites and methods exist."""
    Plan(read_plan(ROOT / "docs/evidence/plan.yaml"), conditions(tmp_path)).check()


def test_failed_runs_end_the_command_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists them, and its exit code is 1."""

    def make_runs(jobs: Sequence[RunJob], **_: object) -> Outcome:
        return Outcome(made=list(jobs[1:]), failed=list(jobs[:1]), busy=[])

    monkeypatch.setattr(planning, "make_runs", make_runs)
    plan = Plan([Part(("trace",), ("gem", "lora"), (4,))], conditions(tmp_path))
    with pytest.raises(RunFailedError, match=r"trace  gem  seed 4  \(.*gem\.4\.error\)") as ended:
        carry_out(plan, side_by_side=1, console=Console(file=io.StringIO()))
    assert ended.value.exit_code == 1
    assert "lora" not in str(ended.value)
