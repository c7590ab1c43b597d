"""Returns of known regimes: what only looks like one begins a new regime."""

from collections.abc import Callable
from dataclasses import replace

import orjson
import pytest
from structlog.testing import capture_logs
from torch import Tensor

from streamlearn.events import Event
from streamlearn.regimes.returns import Upcoming
from streamlearn.settings import Settings
from streamlearn.shift.monitor import AssignedBatch
from streamlearn.stream.record import Batch
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import differences
from tests.regimes.shifting_streams import PER_TASK, run, stream
from tests.regimes.test_bit_equality import assert_two_deaths_change_nothing, die_after
from tests.variants import variants


def disguised() -> list[bytes]:
    """Animals, sums, and a third task whose inputs are those of the animals, with answers of its own."""
    lines = stream("animals", "sums", "animals")
    values = [orjson.loads(line) for line in lines]
    return [
        orjson.dumps({**value, "completion": " seven kilos"} if i >= 2 * PER_TASK else value)
        for i, value in enumerate(values)
    ]


def test_records_that_cost_more_than_the_regimes_own_begin_a_new_one(make: Callable[..., Settings]) -> None:
    """The known regime learns nothing from them, and the shift says what its records look like."""
    with capture_logs() as logs:
        _, components = run(make(disguised()))
    *_, last = components.adaptation.state.reports
    assert (last.shift.regime, last.shift.known, last.refused_return) == (3, False, 1)
    assert abs(last.shift.onset - 2 * PER_TASK - 1) <= 1
    assert last.probe_tokens > 0
    records = {each.number: each.records for each in components.adaptation.status().regimes}
    assert records[1] <= PER_TASK + 1
    assert records[3] >= PER_TASK - 1
    [refused] = [line for line in logs if line["event"] == Event.RETURN_REFUSED]
    assert refused["loss"] > 2 * refused["own_loss"]
    assert components.adaptation.status().shifts[-1].refused_return == 1


def test_the_inputs_decide_where_returns_are_not_checked(make: Callable[..., Settings]) -> None:
    """With `probe.max_returns_refused: 0` the same records are the known regime's."""
    _, components = run(make(disguised(), probe={"max_returns_refused": 0.0}))
    *_, last = components.adaptation.state.reports
    assert (last.shift.regime, last.shift.known, last.refused_return) == (1, True, None)


@pytest.mark.parametrize(
    "steps", variants({"before": 0, "right after": 1, "after its declaration": 3}, short=["right after"])
)
def test_a_death_around_a_refusal_changes_no_bit(
    make: Callable[..., Settings],
    undisturbed: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    """Also between the first record of the new regime and the one at which it is declared."""
    lines = disguised()
    whole = undisturbed(lines)
    settings = make(lines, "killed", snapshot={"every_records": 4})
    first = 2 * PER_TASK // 4 - 2 + steps
    die_after(monkeypatch, [first, first + 1])
    assert_two_deaths_change_nothing(settings, whole, len(lines))


def test_a_return_without_records_is_believed(make: Callable[..., Settings]) -> None:
    """After a flush a shift may be found late, and come with a batch that has no record of its regime."""
    with opened(make(stream("animals", per_task=8))) as components:
        daemon_of(components).run()
        adaptation = components.adaptation
        (first,) = adaptation.state.reports
        again = replace(first.shift, known=True)
        assert adaptation.return_checks.applies(again, adaptation.by_slot)
        assigned = AssignedBatch(Batch((), (), ()), (), (again,))
        upcoming = Upcoming(assigned, 9, 0, adaptation.by_slot, {}, lambda _: ())
        adaptation.monitor.load(adaptation.monitor.trained)
        assert not adaptation.return_checks.refuse(upcoming)


def visited(answer: str | None) -> list[bytes]:
    """Animals, sums, and sums with an animal as every third record, with its own answer or another."""
    lines = stream("animals", "sums", "sums")
    animals = stream("animals")
    for i in range(2 * PER_TASK, 3 * PER_TASK, 3):
        value = orjson.loads(animals[i % PER_TASK])
        lines[i] = orjson.dumps(value if answer is None else {**value, "completion": answer})
    return lines


def test_single_records_that_cost_more_are_not_the_regimes(make: Callable[..., Settings]) -> None:
    """The stream stays with the sums; the animals' regime learns nothing from what only looks like its records."""
    with capture_logs() as logs:
        _, components = run(make(visited(" seven kilos")))
    records = {each.number: each.records for each in components.adaptation.status().regimes}
    assert records[1] <= PER_TASK + 1
    refused = [line for line in logs if line["event"] == Event.VISIT_REFUSED]
    assert refused
    assert all((line["regime"], line["loss"] > line["own_loss"]) == (1, True) for line in refused)


@pytest.mark.parametrize("batches", variants([1, 2], short=["2"]))
def test_a_visit_is_checked_by_records_that_every_run_has_read(
    make: Callable[..., Settings],
    undisturbed: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    batches: int,
) -> None:
    """A probe waited, so more had been read than after a restart. The first visits cost more, later ones do not."""
    lines, animals = stream("animals", "sums", "cities"), stream("animals")
    for count, place in enumerate(range(2 * PER_TASK + 9, 3 * PER_TASK, 3)):
        value = orjson.loads(animals[place % PER_TASK])
        lines[place] = orjson.dumps({**value, "completion": " seven kilos"} if count < 6 else value)
    probe = {"similarity_tokens": 1800}
    whole = undisturbed(lines, probe=probe)
    settings = make(lines, "killed", snapshot={"every_records": 4}, probe=probe)
    die_after(monkeypatch, [2 * PER_TASK // 4 + batches])
    with pytest.raises(KeyboardInterrupt):
        run(settings)
    assert differences(whole, run(settings)[0]) == []


def test_single_records_of_a_regime_are_its(make: Callable[..., Settings]) -> None:
    """Visits with the regime's own answers are not refused."""
    with capture_logs() as logs:
        _, components = run(make(visited(None)))
    records = {each.number: each.records for each in components.adaptation.status().regimes}
    assert records[1] >= PER_TASK * 4 // 3 - 3
    assert not [line for line in logs if line["event"] == Event.VISIT_REFUSED]


@pytest.mark.parametrize("steps", variants([0, 2, 5], short=["2"]))
def test_a_death_around_a_refused_visit_changes_no_bit(
    make: Callable[..., Settings],
    undisturbed: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
) -> None:
    """Also between the record that was refused with its batch and those that were read ahead."""
    lines = visited(" seven kilos")
    whole = undisturbed(lines)
    settings = make(lines, "killed", snapshot={"every_records": 4})
    first = 2 * PER_TASK // 4 - 2 + steps
    die_after(monkeypatch, [first, first + 1])
    assert_two_deaths_change_nothing(settings, whole, len(lines))
