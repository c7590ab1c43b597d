"""Shifts through the whole loop: found, probed, entered, and shown."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import orjson
import pytest
import torch
from structlog.testing import capture_logs

from streamlearn.daemon.build import Components
from streamlearn.events import Event
from streamlearn.learner import evaluate as evaluation
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import PackedBatch, PackedLoss, packed_loss
from streamlearn.regimes import regimes
from streamlearn.regimes.regimes import CONFIRM_RECORDS
from streamlearn.regimes.report import ShiftReport
from streamlearn.regimes.route import HeadStart, RoutedInput, measure_head_start
from streamlearn.settings import Settings
from streamlearn.shift.detector import Shift
from streamlearn.shift.drift import ConceptDriftDetector
from streamlearn.shift.features import input_of
from streamlearn.status import Status
from streamlearn.stream.record import Batch, Example
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import hooks_of
from tests.regimes.shifting_streams import PER_TASK, Silent, mixed, run, stream
from tests.variants import variants


def test_regimes_are_found_entered_and_recognised(make: Callable[..., Settings]) -> None:
    """Three tasks and the return of the first: three new regimes, one recognised, each from its first record on."""
    _, components = run(make(stream("animals", "sums", "cities", "animals")))
    entries = list(components.adaptation.state.reports)
    assert [(e.shift.regime, e.shift.known) for e in entries] == [(1, False), (2, False), (3, False), (1, True)]
    assert [e.shift.onset for e in entries] == [1, PER_TASK + 1, 2 * PER_TASK + 1, 3 * PER_TASK + 1]
    assert [bool(e.probe_tokens) for e in entries] == [False, True, True, False]
    assert components.adaptation.state.current == 0


def test_a_regime_starts_from_the_adapter_that_explains_it_best(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the weights of the regime with the lowest loss, and reported as such."""
    starts: list[dict[str, bool]] = []
    add_regime = Learner.add_regime

    def opened_with(self: Learner, slot: int, seed: int, *, start: int | None = None) -> None:
        add_regime(self, slot, seed, start=start)
        if start is not None:
            banks = {(bank.adapter, bank.linear): bank for bank in self.banks}
            pairs = [
                (bank, banks[f"regime{start}", linear])
                for (name, linear), bank in banks.items()
                if name == f"regime{slot}"
            ]
            starts.append(
                {bank.linear: torch.equal(bank.A, other.A) and torch.equal(bank.B, other.B) for bank, other in pairs}
            )

    def measured(
        learner: Any, examples: Sequence[Example], known: Sequence[int], averaged: tuple[int, ...], *, pack_tokens: int
    ) -> HeadStart:
        result = measure_head_start(learner, examples, known, averaged, pack_tokens=pack_tokens)
        assert set(result.losses) == set(known) == set(averaged)
        return replace(result, losses={slot: 0.1 + abs(slot - 1) for slot in known}, backbone_loss=5.0)

    monkeypatch.setattr(Learner, "add_regime", opened_with)
    monkeypatch.setattr(regimes, "measure_head_start", measured)
    _, components = run(make(stream("animals", "sums", "cities")))
    assert [report.started_from for report in components.adaptation.state.reports] == [None, 1, 2]
    assert [all(each.values()) for each in starts] == [True, True]
    assert all(starts)


@pytest.mark.parametrize("preset", variants(["streamlearn", "cp-moe"], short=["streamlearn"]))
def test_a_split_regime_starts_from_the_adapter_of_both(make: Callable[..., Settings], preset: str) -> None:
    """The stream stays in the old regime, the new one is not probed, and each has its own records in its samples."""
    shape = {"stream": {"max_tokens": 256, "batch_tokens": 512}, "learner": {"lr": 1e-2, "rehearsal": 0.25}}
    shape["holdout"] = {"every_records": 4}
    settings = make(mixed(160), adapter={"preset": preset, "num_heads": 1}, **shape)
    _, components = run(settings)
    adaptation = components.adaptation
    first, split = adaptation.state.reports
    assert (split.shift.parent, split.shift.previous, split.shift.known) == (1, 1, False)
    assert split.started_from == (1 if preset == "streamlearn" else None)
    assert (first.probe_tokens > 0, split.probe_tokens) == (preset == "cp-moe", 0)  # whose importance a probe measures
    assert (adaptation.state.current, adaptation.state.undivided) == (0, [])
    for sample in ("holdouts", "rehearsal"):
        records = [getattr(adaptation.by_slot[slot], sample).examples for slot in (0, 1)]
        lengths = [{len(record) for record in own} for own in records]
        assert all(lengths)
        assert not lengths[0] & lengths[1]


def test_a_shift_among_shared_experts_probes_draws_and_protects(make: Callable[..., Settings]) -> None:
    """Preset mh-cp-moe as a whole: transient expert, CKA, routing bias and importance, and where the tokens then go."""
    _, components = run(make(stream("animals", "sums"), adapter={"preset": "mh-cp-moe"}))
    adaptation = components.adaptation
    first, second = adaptation.state.reports
    for report in (first, second):
        assert report.probe_losses is not None
        assert not report.probe_failed
        assert report.probe_losses[1] < report.probe_losses[0]
        assert report.mean_importance is not None
        assert report.mean_importance > 0
    assert first.mean_similarity == 0  # of experts that are untrained
    assert second.mean_similarity is not None
    assert second.mean_similarity > 0
    held = hooks_of(components.learner).importance()
    assert any(importance.any() for importance in held.values())  # of the regime that was left
    one, two = adaptation.status().experts
    assert (one.regime, two.regime) == (1, 2)
    assert one.bias is not None
    assert two.bias is not None
    assert not any(chain(*one.bias))
    assert fmean(chain(*two.bias)) == pytest.approx(0.2 * second.mean_similarity, abs=1e-4)
    assert all(sum(head) == pytest.approx(1.0, abs=1e-3) for head in (*one.shares, *two.shares))
    assert 1 <= (adaptation.status().effective_regimes or 0) <= 2


class Asking(Silent):
    """Asks after each step what answers an input of the first task, by routing and by every regime's number."""

    def __init__(self, components: Components) -> None:
        self.routed: list[tuple[bool, RoutedInput]] = []
        """Whether the state was settled, and the answer."""
        self._components = components
        self._inputs: list[Any] = []

    def on_step(self, batch: Batch, step: Step, status: Status) -> None:
        """Ask."""
        adaptation = self._components.adaptation
        self._inputs = self._inputs or [input_of(batch.examples[0])]
        for number in adaptation.numbers.values():
            [result] = adaptation.route(self._inputs, number)
            assert result.route.regime == number
        self.routed += [(adaptation.can_drop, each) for each in adaptation.route(self._inputs)]


def test_requests_are_answered_while_a_regime_is_entered(make: Callable[..., Settings]) -> None:
    """It has a number before anything is known of its inputs; nothing of the regime that it replaces answers for it."""
    settings = make(stream("animals", "sums", "cities"), shift={"max_regimes": 2})
    with opened(settings) as components:
        asking = Asking(components)
        daemon_of(components, asking).run()
    replaced = [result for settled, result in asking.routed if not settled and result.route.regime in (None, 3)]
    assert replaced
    assert not any(result.route.known for result in replaced)
    assert {result.route.answered_by for result in replaced} <= {"backbone", "mean"}
    assert [result.route.regime for settled, result in asking.routed[:20] if settled] == [1] * 20


def test_a_held_out_record_without_a_finite_loss_stops_no_snapshot(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have been a dead letter, and is left out of the score."""
    lines = stream("animals", per_task=60)
    value = orjson.loads(lines[19])
    lines[19] = orjson.dumps({**value, "prompt": "poison " + value["prompt"]})
    with opened(make(lines)) as components, capture_logs() as logs:
        spell = components.model.backbone.tokenizer.decode

        def poisoned(model: Any, packed: PackedBatch) -> PackedLoss:
            loss = packed_loss(model, packed)
            hit = "poison" in spell(packed.input_ids[0].tolist())
            return PackedLoss(loss.mean, loss.token_L * float("nan"), loss.correct_L) if hit else loss

        monkeypatch.setattr(evaluation, "packed_loss", poisoned)
        daemon_of(components).run()
        assert components.adaptation.state.records == 60
        assert components.store.names()[-1] == components.store.infos()[-1].name
        assert components.store.infos()[-1].position.offsets != components.store.infos()[0].position.offsets
    assert Event.DEGRADATION_STARTED not in [event["event"] for event in logs]
    assert Event.HOLDOUT_NOT_FINITE in [event["event"] for event in logs]


def test_the_status_shows_both_regimes_and_their_shift(make: Callable[..., Settings]) -> None:
    """After two tasks: records add up to the stream, the first regime is past and scored, AF is a number.

    The first regime's adapter rests since its last record, and so do its scores.
    """
    with opened(make(stream("animals", "sums"))) as components:
        daemon = daemon_of(components)
        daemon.run()
        daemon.score_all()
        status = daemon.board.read()
        last_step = components.learner.number
    result = status.adaptation
    assert [(r.number, r.current, r.visits) for r in result.regimes] == [(1, False, 1), (2, True, 1)]
    assert [r.records for r in result.regimes] == [PER_TASK, PER_TASK]
    assert [(r.first_record, r.last_record) for r in result.regimes] == [(1, PER_TASK), (PER_TASK + 1, 2 * PER_TASK)]
    assert [r.holdout_records for r in result.regimes] == [PER_TASK // 20] * 2
    assert status.records_held_out == 2 * (PER_TASK // 20)
    assert status.records_trained == 2 * (PER_TASK - PER_TASK // 20)
    first, second = result.regimes
    assert first.end_accuracy is not None
    assert second.end_accuracy is None
    assert first.now is not None
    assert second.now is not None
    assert result.shifts[-1].step <= first.now.step <= second.now.step == last_step
    assert first.best_accuracy == max(first.end_accuracy, first.now.accuracy)
    assert second.best_accuracy is None
    assert result.average_forgetting == first.best_accuracy - first.now.accuracy
    assert result.average_forgetting >= 0
    assert result.backward_transfer == first.now.accuracy - first.end_accuracy
    assert result.num_shifts == {"inputs": 1}  # the first regime is entered without a shift
    first_regime, probed = result.shifts
    assert (first_regime.previous, first_regime.probe_tokens, first_regime.mean_similarity) == (None, 0, None)
    assert (probed.kind, probed.regime, probed.known, probed.previous) == ("inputs", 2, False, 1)
    assert probed.onset == PER_TASK + 1
    assert probed.probe_tokens >= 300
    assert probed.mean_similarity is None  # there is nothing to compare a transient expert with
    assert result.probe_seconds == probed.probe_seconds > 0
    assert result.holdout_seconds > 0


def test_the_status_is_the_same_after_a_restart(make: Callable[..., Settings]) -> None:
    """The manifest and the snapshot's tensors hold all of it but the seconds, which are per process."""
    settings = make(stream("animals", "sums", "animals"))
    _, components = run(settings)
    with opened(settings) as again:
        after, before = again.adaptation.status(), components.adaptation.status()
        assert after.regimes == before.regimes
        assert [(r.number, r.visits, r.current) for r in after.regimes] == [(1, 2, True), (2, 1, False)]
        assert after.shifts == before.shifts
        assert after.num_shifts == before.num_shifts == {"inputs": 2}
        assert (after.average_forgetting, after.backward_transfer) == (
            before.average_forgetting,
            before.backward_transfer,
        )
        assert (after.probe_seconds, after.holdout_seconds) == (0.0, 0.0)


def test_changed_answers_are_a_shift_of_their_own_kind(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted separately and passed to the observer; scores and sampled records from before it are dropped."""
    declared: list[Shift] = []

    def heed(self: ConceptDriftDetector, slot: int, regime: int, ordinal: int, losses: Sequence[float]) -> list[Shift]:
        if ordinal < 60 or declared:
            return []
        declared.append(Shift("answers", 1, regime, slot, True, regime, ordinal, ordinal, 1.5, 0.0))
        return declared

    monkeypatch.setattr(ConceptDriftDetector, "update", heed)
    settings = make(stream("animals", per_task=2 * PER_TASK), learner={"rehearsal": 0.25, "rehearsal_records": 1000})
    with opened(settings) as components:
        collector = Collector()
        daemon = daemon_of(components, collector)
        daemon.run()
        daemon.score_all()
        result = daemon.board.read().adaptation
    assert [entry.shift.kind for entry in collector.entries] == ["inputs", "answers"]
    assert result.num_shifts == {"inputs": 0, "answers": 1}
    shift = result.shifts[-1]
    assert (shift.kind, shift.regime, shift.previous, shift.known) == ("answers", 1, 1, True)
    (regime,) = result.regimes
    assert (regime.records, regime.visits) == (2 * PER_TASK, 1)
    assert 0 < regime.holdout_records < 2 * PER_TASK // 20
    assert regime.rehearsal_records == components.adaptation.by_slot[0].rehearsal.seen < 2 * PER_TASK - 60
    assert regime.history
    assert all(scoring.step > shift.step for scoring in regime.history)


class Collector(Silent):
    """One that keeps the shifts it receives."""

    def __init__(self) -> None:
        self.entries: list[ShiftReport] = []

    def on_shift(self, entry: ShiftReport) -> None:
        self.entries.append(entry)


def test_a_regime_that_returns_is_scored_before_it_is_trained_on(make: Callable[..., Settings]) -> None:
    """Without time for scores: the one at its segment's end is made at the last moment, with the weights of the end."""
    settings = make(stream("animals", "sums", "animals"), holdout={"time_share": 0.0})
    with capture_logs() as events:
        _, components = run(settings)
    (ended,) = (event for event in events if event["event"] == Event.HOLDOUT_SCORED and event["at_end"])
    left, returned = [report.step for report in components.adaptation.state.reports][1:]
    assert (ended["regime"], ended["records"]) == (1, PER_TASK // 20)
    assert left < ended["step"] == returned
    regime = components.adaptation.status().regimes[0]
    assert [point.step for point in regime.history] == [returned]


def suspicion(slot: int, regime: int, at: int) -> Shift:
    return Shift(
        "answers", 1, regime, slot, known=True, previous=regime, declared_at=at, onset=at, statistic=1, threshold=0
    )


@pytest.mark.parametrize("explained", [True, False])
def test_a_shift_of_the_answers_waits_for_a_shift_of_the_inputs(make: Callable[..., Settings], explained: bool) -> None:
    """A rise of the loss right before new inputs is due to them; without them the regime is released after the wait."""
    settings = make(stream("animals", "sums" if explained else "animals"))
    with opened(settings) as components:
        adaptation = components.adaptation
        raised: list[int] = []

        def rise(slot: int, regime: int, ordinal: int, losses: Any) -> list[Shift]:
            if ordinal == PER_TASK - 4 and not raised:
                raised.append(ordinal)
                return [suspicion(slot, regime, ordinal)]
            return []

        adaptation.answers.update = rise  # type: ignore[method-assign]
        daemon_of(components).run()
        answers = [entry.shift for entry in adaptation.state.reports if entry.shift.kind == "answers"]
        if explained:
            assert answers == []
        else:
            assert [shift.regime for shift in answers] == [1]
            assert answers[0].declared_at >= PER_TASK - 4 + CONFIRM_RECORDS
        assert adaptation.state.suspected == []
