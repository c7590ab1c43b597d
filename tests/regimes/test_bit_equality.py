"""What must change no bit of what is learned: a death anywhere near a shift, a record's `meta`, a question."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from streamlearn.baselines import consolidate
from streamlearn.baselines.consolidate import BaselineHooks
from streamlearn.baselines.transient import probe
from streamlearn.board import Board, Clock
from streamlearn.daemon.loop import Daemon
from streamlearn.jobs.queue import EvalJob, EvalResult, JobQueue, Result
from streamlearn.learner.learner import Hooks, Learner, Rehearsal, Step
from streamlearn.regimes import regimes
from streamlearn.regimes.holdout import Reservoir
from streamlearn.regimes.regimes import Regimes
from streamlearn.regimes.route import measure_head_start
from streamlearn.settings import Settings
from streamlearn.status import Phase, Status
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import opened
from tests.learners import differences
from tests.regimes.shifting_streams import PER_TASK, SHAPES, Silent, mixed, run, stream, tensors_of
from tests.variants import variants


def assert_two_deaths_change_nothing(settings: Settings, whole: dict[str, Tensor], records: int) -> None:
    """Assert that a run that is killed twice ends with the bits of the whole one, and every record once."""
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    state, components = run(settings)
    assert differences(whole, state) == []
    assert components.state.records == records


def die_after(monkeypatch: pytest.MonkeyPatch, due: list[int]) -> None:
    """Let the process die at the first step after each of these."""
    step = Learner.step

    def die_when_due(learner: Learner, *args: Any, **kwargs: Any) -> Step:
        if due and learner.number >= due[0]:
            due.pop(0)
            raise KeyboardInterrupt
        return step(learner, *args, **kwargs)

    monkeypatch.setattr(Learner, "step", die_when_due)


@pytest.mark.parametrize("where", ["probe", "leave", "open", "enter"])
@pytest.mark.parametrize("shape", variants(SHAPES, short=["adapter of its own"]))
def test_a_death_at_a_shift_changes_no_bit(
    make: Callable[..., Settings],
    undisturbed: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    shape: dict[str, Any],
) -> None:
    """Killed while a regime is probed, closed, opened or entered: every tensor ends as in an uninterrupted run."""
    lines = stream("animals", "sums", "cities")
    whole = undisturbed(lines, **shape)
    settings = make(lines, "killed", **shape)
    deaths: list[str] = []

    def dying(really: Callable[..., Any]) -> Callable[..., Any]:
        def die_twice(*args: Any, **kwargs: Any) -> Any:
            result = really(*args, **kwargs)  # what it did is lost with the process
            if len(deaths) < 2:
                deaths.append(where)
                raise KeyboardInterrupt
            return result

        return die_twice

    if where == "probe":
        monkeypatch.setattr(consolidate, "probe", dying(probe))
        if not shape:
            monkeypatch.setattr(regimes, "measure_head_start", dying(measure_head_start))
    else:
        hooks = BaselineHooks if shape else Hooks
        monkeypatch.setattr(hooks, where, dying(getattr(hooks, where)))
    assert_two_deaths_change_nothing(settings, whole, len(lines))


def test_a_death_among_regimes_with_importance_changes_no_bit(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a second regime, and the first after its return, is held by the other's importance."""
    lines = stream("animals", "sums", "animals")
    whole, components = run(make(lines, "whole", **SHAPES["one adapter"]))
    assert [report.shift.regime for report in components.adaptation.state.reports] == [1, 2, 1]
    assert any(group.holds for group in components.learner.optimizer.groups)
    for slot in (0, 1):
        assert any(omega.any() for name, omega in whole.items() if name.startswith(f"baseline.importance.{slot}."))
    settings = make(lines, "killed", **SHAPES["one adapter"])
    die_after(monkeypatch, [PER_TASK // 4 + 12, 2 * PER_TASK // 4 + 12])
    assert_two_deaths_change_nothing(settings, whole, len(lines))


def test_deaths_while_adapters_rest_change_nothing(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter in memory and two deaths, against all in memory and none: the same bits."""
    lines = stream("animals", "sums", "cities", "animals", "sums")
    whole, components = run(make(lines))
    assert components.learner.cache.num_in_memory == 3
    settings = make(lines, "killed", adapter={"max_in_memory": 1})
    die_after(monkeypatch, [2 * PER_TASK // 4 + 12, 4 * PER_TASK // 4 + 2])
    assert_two_deaths_change_nothing(settings, whole, len(lines))
    assert not (settings.state / "offloaded").exists()


def test_a_shift_is_described_as_without_deaths(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that came and went, and typical records: of the regime's own records, the same after two deaths."""
    lines, shape = stream("animals", "sums", "animals"), {"holdout": {"every_records": 10}}
    _, whole = run(make(lines, "whole", **shape))
    first, second, third = whole.adaptation.state.reports
    assert (first.tokens_came, first.tokens_went, first.typical_records_before) == ((), (), ())
    assert {"add", "say", "what"} <= set(second.tokens_came)
    assert {"fox", "met", "number"} <= set(second.tokens_went)
    assert set(third.tokens_came) & set(second.tokens_went) >= {"fox", "met", "number"}
    for report, number in ((first, 0), (second, 1), (third, 2)):
        offsets = [int(record.removeprefix("stream.jsonl:0:")) for record in report.typical_records]
        assert len({offset for offset in offsets if offset // PER_TASK == number}) == 3
    before = [int(record.rpartition(":")[2]) for record in second.typical_records_before]
    assert len({offset for offset in before if offset % 10 == 9 and offset < PER_TASK}) == 3
    settings = make(lines, "killed", **shape)
    die_after(monkeypatch, [PER_TASK // 4 + 2, 2 * PER_TASK // 4 + 2])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    _, killed = run(settings)
    described = [
        [(r.tokens_came, r.tokens_went, r.typical_records, r.typical_records_before) for r in reports]
        for reports in (whole.adaptation.state.reports, killed.adaptation.state.reports)
    ]
    assert described[0] == described[1]


REHEARSING = {"learner": {"updates_per_batch": 2, "rehearsal": 0.25, "rehearsal_records": 12}}


def test_deaths_with_rehearsal_and_further_updates_change_no_bit(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records kept for rehearsal, and what is drawn of them, are those of an uninterrupted run."""
    lines = stream("animals", "sums", "animals")
    drawn: list[list[Rehearsal]] = []
    rehearse = Regimes.rehearse

    def spy(regimes: Regimes, slots: Sequence[int]) -> list[Rehearsal]:
        drawn.append(rehearse(regimes, slots))
        assert {slot for draw in drawn[-1] for slot in draw.slots} <= set(slots)
        return drawn[-1]

    monkeypatch.setattr(Regimes, "rehearse", spy)
    whole, components = run(make(lines, "whole", **REHEARSING))
    regimes = components.adaptation.status().regimes
    assert [regime.rehearsal_records for regime in regimes] == [12, 12]
    records = sum(regime.rehearsal.seen for regime in components.adaptation.by_slot.values())
    assert records == components.state.ledger.trained.total()
    first, second = (sum(len(updates[number].examples) for updates in drawn) for number in range(2))
    assert first == second
    assert first == pytest.approx(records / 3, abs=4)
    settings = make(lines, "killed", **REHEARSING)
    die_after(monkeypatch, [PER_TASK // 4 + 12, 2 * PER_TASK // 4 + 12])
    assert_two_deaths_change_nothing(settings, whole, len(lines))


def test_a_snapshot_while_records_are_buffered_for_a_probe_changes_no_bit(
    make: Callable[..., Settings],
    undisturbed: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds nothing that was looked ahead at and not trained on, also right after a restart."""
    lines = stream("animals", "sums", "cities")
    whole = undisturbed(lines)
    settings = make(lines, "killed", snapshot={"every_records": PER_TASK - 6})
    read, life = Daemon._read, [""]

    def save_and_die(daemon: Daemon) -> bool:
        if daemon.adaptation.monitor._decided and life[0] in "ab":  # decided, and waiting for its probe
            if life[0] == "b":
                daemon.save()
            raise KeyboardInterrupt
        return read(daemon)

    monkeypatch.setattr(Daemon, "_read", save_and_die)
    for life[0] in "ab":
        with pytest.raises(KeyboardInterrupt):
            run(settings)
    life[0] = "c"
    state, _ = run(settings)
    assert differences(whole, state) == []


def test_a_death_at_a_split_changes_no_bit(make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the new regime is opened, and while hold-out records are divided."""
    lines = mixed(160)
    shape = {"holdout": {"every_records": 4}, "snapshot": {"every_records": 12}, **REHEARSING}
    whole, _ = run(make(lines, "whole", **shape))
    settings = make(lines, "killed", **shape)
    for target, name in ((Learner, "add_regime"), (Reservoir, "move")):
        really = getattr(target, name)
        calls: list[int] = []

        def die_at_the_first(*args: Any, really: Any = really, calls: list[int] = calls, **kwargs: Any) -> None:
            really(*args, **kwargs)  # what it did is lost with the process
            calls.append(1)
            if len(calls) == 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(target, name, die_at_the_first)
        with pytest.raises(KeyboardInterrupt):
            run(settings)
        monkeypatch.setattr(target, name, really)
    state, components = run(settings)
    assert differences(whole, state) == []
    assert components.state.records == len(lines)


def test_scrambling_meta_changes_no_bit(make: Callable[..., Settings]) -> None:
    """Nothing that learns reads a record's `meta`."""
    tasks = ("animals", "sums")
    plain, _ = run(make(stream(*tasks), "plain"))
    scrambled, _ = run(make(stream(*tasks, meta="another"), "scrambled"))
    assert differences(plain, scrambled) == []


def test_requests_change_no_bit(make: Callable[..., Settings]) -> None:
    """Under constant requests, served in pieces between steps, the run ends in the same bits and counts."""
    lines = stream("animals", "sums")
    quiet, _ = run(make(lines, "quiet"))
    with opened(make(lines, "asked", serve={"eval_budget_s": 1e-6})) as components:
        jobs = JobQueue(1)
        answers: list[Future[Result]] = []

        class Requester(Silent):
            def on_step(self, batch: Batch, step: Step, status: Status) -> None:
                if not answers or answers[-1].done():
                    answers.append(jobs.submit(EvalJob(({"text": "a dog"},) * 4, generate=True, max_new_tokens=1)))

        daemon = Daemon(components, Board(Status(Phase.STARTING), Clock()), jobs, observer=Requester())
        daemon.run()
        asked = tensors_of(components)
    results = [future.result(timeout=0) for future in answers if future.done() and future.exception() is None]
    steps = [result.step for result in results if isinstance(result, EvalResult)]
    assert len(steps) > 10
    assert any(later - earlier > 1 for earlier, later in pairwise(steps)), "no answer took several steps"
    assert differences(quiet, asked) == []
