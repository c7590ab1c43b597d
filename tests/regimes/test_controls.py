"""Regimes that an operator freezes, renames or drops while the stream goes on."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from streamlearn import codec
from streamlearn.daemon.build import Components
from streamlearn.daemon.loop import Daemon
from streamlearn.errors import RegimeBusyError, RegimeError
from streamlearn.events import Event
from streamlearn.learner.learner import Learner, Step
from streamlearn.regimes.holdout import ScoreHistory
from streamlearn.settings import Settings
from streamlearn.shift.detector import Shift
from streamlearn.stream.record import Example
from tests.daemon.test_daemon import daemon_of, opened
from tests.learners import differences
from tests.regimes.operated import Act, adapter, assert_consistent, operate
from tests.regimes.shifting_streams import PER_TASK, SHAPES, mixed, run, stream
from tests.variants import variants

STEPS = PER_TASK // 4  # of one task


def in_turns(*tasks: str, per_task: int = PER_TASK) -> list[bytes]:
    """Records of several tasks, one of each at a time."""
    each = [stream(task, per_task=per_task) for task in tasks]
    return [line for lines in zip(*each, strict=True) for line in lines]


MIXED = [*stream("animals", "sums"), *in_turns("animals", "sums")]
"""Two regimes, one after the other and then in the same batches."""


def freeze(number: int) -> Act:
    return lambda daemon: daemon.adaptation.freeze(number)


def unfreeze(number: int) -> Act:
    return lambda daemon: daemon.adaptation.unfreeze(number)


def drop(number: int) -> Act:
    return lambda daemon: daemon.adaptation.drop(number)


def rename(number: int, name: str) -> Act:
    return lambda daemon: daemon.adaptation.rename(number, name)


def test_a_frozen_regime_keeps_every_bit_in_batches_of_several_regimes(make: Callable[..., Settings]) -> None:
    """Weights, moments and counts; its records are still counted, held out and measured, and the position moves."""
    before: dict[str, Any] = {}

    def freeze_first(daemon: Daemon) -> None:
        daemon.adaptation.freeze(1)
        learner = daemon.learner
        before.update({f"regime0: {name}": weight.clone() for name, weight in learner.weights("regime0").items()})
        before.update({name: moment.clone() for name, moment in learner.moments("regime0").items()})
        before["status"] = daemon.adaptation.status().regimes

    state, components = operate(make(MIXED), {2 * STEPS + 4: freeze_first})
    then, (frozen, other) = before.pop("status"), components.adaptation.status().regimes
    assert differences(before, adapter(state, 0)) == []
    assert frozen.frozen
    assert not other.frozen
    assert frozen.records - then[0].records > 60
    assert frozen.holdout_records > then[0].holdout_records
    assert frozen.prequential_loss is not None
    assert frozen.prequential_loss != then[0].prequential_loss
    ((_, _, trained, dead, held_out, _),) = components.state.ledger.rows()
    assert (trained + held_out, dead) == (len(MIXED), 0)
    assert held_out > 60
    assert list(components.state.ledger.position.values()) == [len(MIXED)]


def test_the_other_regimes_train_as_if_frozen_records_had_not_come(
    make: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a run whose steps never see those records: the same weights, moments and counts of updates."""
    at = 2 * STEPS + 4
    frozen, _ = operate(make(MIXED, "frozen"), {at: freeze(1)})
    step, shared = Learner.step, list[int]()

    def without_the_first(learner: Learner, examples: list[Example], slots: tuple[int, ...], **options: Any) -> Step:
        kept = [i for i, slot in enumerate(slots) if slot != 0 or learner.number < at]
        if 0 < len(kept) < len(slots):
            shared.append(learner.number)
        if not kept:
            learner.skip_step()
            return Step(learner.number, 1.0, (1.0,) * len(slots), 0, 0, 0.0, 0.0)
        options["on_record"] = lambda _: None
        taken = step(learner, [examples[i] for i in kept], [slots[i] for i in kept], **options)
        losses = dict(zip(kept, taken.record_losses, strict=True))
        return replace(taken, record_losses=tuple(losses.get(i, 1.0) for i in range(len(slots))))

    monkeypatch.setattr(Learner, "step", without_the_first)
    stripped, _ = operate(make(MIXED, "stripped"), {at: lambda _: None})
    assert len(shared) > 10, "few batches have records of both"
    assert differences(adapter(frozen, 1), adapter(stripped, 1)) == []
    assert torch.equal(frozen["learner.counts"], stripped["learner.counts"])


@pytest.mark.parametrize("preset", ["cp-moe", "mh-moe"])
def test_a_regime_without_an_adapter_of_its_own_cannot_be_frozen(make: Callable[..., Settings], preset: str) -> None:
    """The message says why, and what to do; it can have a name and be dropped."""
    settings = make(stream("animals"), adapter={"preset": preset, "num_heads": 1})
    _, components = run(settings)
    with pytest.raises(RegimeError, match=f"regime 1 must have an adapter of its own .* found preset {preset}"):
        components.adaptation.freeze(1)
    components.adaptation.rename(1, "animals")
    components.adaptation.drop(1)
    assert components.adaptation.status().regimes == ()


def test_an_unknown_number_is_refused_with_the_known_ones(make: Callable[..., Settings]) -> None:
    """Nothing changes."""
    acts = (freeze(7), unfreeze(7), rename(7, "x"), drop(7))
    with opened(make(stream("animals", "sums"))) as components:
        daemon = daemon_of(components)
        for act in acts:
            with pytest.raises(RegimeError, match="which are none yet, found 7"):
                act(daemon)
        daemon.run()
        before = regimes_of(components)
        for act in acts:
            with pytest.raises(RegimeError, match="a remembered regime, which are 1, 2, found 7"):
                act(daemon)
        assert regimes_of(components) == before


def test_a_dropped_regime_that_returns_is_a_new_one(make: Callable[..., Settings]) -> None:
    """It takes the free slot, with another number, an untrained adapter, and nothing of what the old one had."""
    lines = stream("animals", "sums", "animals")
    checked: list[Any] = []

    def drop_first(daemon: Daemon) -> None:
        daemon.adaptation.rename(1, "animals")
        daemon.adaptation.drop(1)
        assert_consistent(daemon)
        assert daemon.adaptation.numbers == {1: 2}
        checked.append(daemon.adaptation.state.current)

    with capture_logs() as logs:
        _, components = operate(make(lines), {STEPS + 12: drop_first})
    assert checked == [1]
    adaptation = components.adaptation
    assert adaptation.numbers == {0: 3, 1: 2}
    assert [report.shift.known for report in adaptation.state.reports] == [False, False, False]
    regimes = {regime.number: regime for regime in adaptation.status().regimes}
    assert (regimes[3].visits, regimes[3].name, regimes[3].slot) == (1, "", 0)
    assert PER_TASK - 5 < regimes[3].records <= PER_TASK
    assert {"event": Event.REGIME_DROPPED, "regime": 1, "left": [2]}.items() <= next(
        log for log in logs if log["event"] == Event.REGIME_DROPPED
    ).items()


@pytest.mark.parametrize("shape", variants(SHAPES, short=["adapter of its own"]))
def test_after_the_regime_of_the_segment_is_dropped_the_next_record_begins_one(
    make: Callable[..., Settings], shape: dict[str, Any]
) -> None:
    """Also the only one that there is. The new regime follows the dropped one, and every record is done once."""
    lines = stream("animals", "sums")
    acts = {10: drop(1), STEPS + 14: drop(3)}
    _, components = operate(make(lines, **shape), acts, check=assert_consistent)
    shifts = [report.shift for report in components.adaptation.state.reports]
    assert [(shift.regime, shift.previous, shift.known) for shift in shifts] == [
        (1, None, False),
        (2, 1, False),
        (3, 2, False),
        (4, 3, False),
    ]
    assert [shift.declared_at == shift.onset for shift in shifts] == [True, True, False, True]
    assert components.state.records == len(lines)
    assert components.adaptation.status().num_shifts == {"inputs": 3}


def test_a_drop_deletes_the_adapter_in_memory_and_at_rest_and_in_the_next_snapshot(
    make: Callable[..., Settings],
) -> None:
    """With the optimizer's state. The snapshots before keep theirs until they are pruned."""
    settings = make(stream("animals", "sums", "cities"), adapter={"max_in_memory": 1})
    with opened(settings) as components:
        daemon = daemon_of(components)
        daemon.run()
        resting = settings.state / "offloaded" / "regime0.safetensors"
        assert resting.exists()
        daemon.adaptation.drop(1)
        assert not resting.exists()
        info = daemon.save()
        folder = components.store.load(info.name).path
        assert sorted(path.name for path in (folder / "adapter").glob("regime*")) == ["regime1", "regime2"]
        assert sorted(path.name for path in (folder / "optimizer").iterdir()) == [
            "regime1.safetensors",
            "regime2.safetensors",
        ]


def test_a_decision_is_in_the_snapshot_that_is_written_after_it(make: Callable[..., Settings]) -> None:
    """Although there was one of the same step."""
    settings = make(stream("animals", "sums"))
    with opened(settings) as components:
        daemon = daemon_of(components)
        daemon.run()
        for act in (rename(1, "animals"), freeze(1), drop(2), rename(1, "wood")):
            act(daemon)
            assert daemon.save().step == components.learner.number
        decided = regimes_of(components)
    with opened(settings) as components:
        assert regimes_of(components) == decided
        assert components.adaptation.numbers == {0: 1}
        (regime,) = components.adaptation.status().regimes
        assert (regime.name, regime.frozen) == ("wood", True)


@pytest.mark.parametrize("number", [1, 2])
def test_of_a_regime_that_was_split_either_part_can_be_dropped(make: Callable[..., Settings], number: int) -> None:
    """Also before their hold-out records are divided, if it is known by then that they are two."""
    shape = {"holdout": {"every_records": 4}, "stream": {"max_tokens": 256, "batch_tokens": 512}}
    _, components = operate(make(mixed(160), **shape), {1: lambda _: None, 20: drop(number)}, check=assert_consistent)
    assert components.adaptation.state.undivided == []
    assert components.state.records == 160


def test_a_regime_that_is_split_off_a_frozen_one_is_frozen_with_a_copy_of_its_adapter(
    make: Callable[..., Settings],
) -> None:
    """From its first record on, also after deaths around the split; unfreezing the one leaves the other frozen."""
    shape = {"holdout": {"every_records": 4}, "shift": {"lookahead_records": 4}}
    lines = [*mixed(80), *stream("animals", per_task=30)]

    def unfreeze_first(daemon: Daemon) -> None:
        assert [regime.frozen for regime in daemon.adaptation.status().regimes] == [True, True, False]
        assert differences(renamed(daemon.learner.weights("regime0")), renamed(daemon.learner.weights("regime1"))) == []
        daemon.adaptation.unfreeze(1)

    acts = {1: freeze(1), 25: unfreeze_first}
    whole, components = operate(make(lines, "whole", **shape), {**acts})
    split, last = list(components.adaptation.state.reports)[1:]
    assert (split.shift.parent, last.shift.parent) == (1, None)
    assert [regime.frozen for regime in components.adaptation.status().regimes] == [False, True, False]
    state, again = die_and_go_on(make(lines, "killed", **shape), {**acts}, [1, last.step + 1, last.step + 3])
    assert differences(whole, state) == []
    assert regimes_of(again) == regimes_of(components)


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a regime's adapter under names that those of another have too."""
    return {name.replace("regime1", "regime0"): weight for name, weight in weights.items()}


def test_a_drop_waits_until_the_stream_has_entered_a_regime(make: Callable[..., Settings]) -> None:
    """The message says how long; nothing changes, and a few batches later it can be done."""
    refused: list[int] = []

    def drop_at_once(daemon: Daemon) -> None:
        if not refused and daemon.adaptation.state.current == 1:
            before = regimes_of(daemon.components)
            with pytest.raises(RegimeBusyError, match=r"shift.lookahead_records \(16\) records or stream.linger_s"):
                daemon.adaptation.drop(1)
            assert regimes_of(daemon.components) == before
            refused.append(daemon.learner.number)
            daemon.adaptation.freeze(1)  # needs no waiting

    settings = make(stream("animals", "sums"), shift={"lookahead_records": 16})
    _, components = operate(settings, {STEPS + 12: drop(1)}, check=drop_at_once)
    assert refused
    assert components.adaptation.numbers == {1: 2}


def test_a_frozen_regime_keeps_its_slot(make: Callable[..., Settings]) -> None:
    """Of two slots the frozen one's is not taken, although its regime is worth least; then the other one's is."""
    lines = stream("animals", "sums", "cities")
    settings = make(lines, "frozen", shift={"max_regimes": 2})
    _, components = operate(settings, {STEPS + 12: freeze(1)}, check=assert_consistent)
    assert components.adaptation.numbers == {0: 1, 1: 2}, "the segment's regime and the frozen one stay"
    settings = make(lines, "free", shift={"max_regimes": 2})
    _, components = operate(settings, {STEPS + 12: rename(1, "animals")}, check=assert_consistent)
    assert components.adaptation.numbers == {0: 3, 1: 2}
    assert [regime.name for regime in components.adaptation.by_slot.values()] == ["", ""]


def test_what_is_undecided_about_a_dropped_regime_is_forgotten(make: Callable[..., Settings]) -> None:
    """A suspected shift of its answers, and a split whose hold-out records are not divided."""
    _, components = run(make(stream("animals", "sums")))
    adaptation = components.adaptation
    shift = Shift("answers", 1, 1, 0, True, 1, 80, 80, 1.0, 0.0)
    adaptation.state.suspected = [shift, replace(shift, regime=2, slot=1)]
    adaptation.state.undivided = [replace(shift, regime=2, slot=1, parent=1), replace(shift, slot=0, parent=9)]
    components.adaptation.drop(1)
    assert [each.regime for each in adaptation.state.suspected] == [2]
    assert adaptation.state.undivided == []


@pytest.mark.parametrize("shape", variants(SHAPES, short=["adapter of its own", "one adapter"]))
def test_deaths_around_an_operators_acts_change_no_bit(make: Callable[..., Settings], shape: dict[str, Any]) -> None:
    """Killed after each act and some steps later: every tensor and count ends as in an uninterrupted run."""
    lines = [*stream("animals", "sums"), *in_turns("animals", "sums", per_task=30), *stream("cities", per_task=30)]
    first: Act = freeze(2) if not shape else rename(2, "frozen")
    acts = {STEPS + 12: first, 2 * STEPS + 2: drop(1), 2 * STEPS + 12: drop(2)}
    whole, components = operate(make(lines, "whole", **shape), {**acts}, check=assert_consistent)
    deaths = [STEPS + 12, 2 * STEPS + 5, 2 * STEPS + 12]
    state, again = die_and_go_on(make(lines, "killed", **shape), {**acts}, deaths)
    assert differences(whole, state) == []
    assert regimes_of(again) == regimes_of(components)
    assert again.state.records == len(lines)


def die_and_go_on(settings: Settings, acts: dict[int, Act], deaths: list[int]) -> tuple[dict[str, Tensor], Components]:
    """A run that dies after each of these steps; an act that is in a snapshot is not repeated."""
    while True:
        try:
            return operate(settings, acts, check=assert_consistent, dies_after=deaths)
        except KeyboardInterrupt:
            continue


def regimes_of(components: Components) -> tuple[Any, Any]:
    """What a snapshot has about regimes, without what depends on time: durations, scores of hold-out records."""
    state = components.adaptation.save()
    arrays, json = codec.dump(
        replace(
            state,
            regimes={slot: replace(regime, scores=ScoreHistory()) for slot, regime in state.regimes.items()},
            reports=[replace(report, probe_seconds=0.0) for report in state.reports],
        )
    )
    return {name: array.tolist() for name, array in arrays.items()}, json


@pytest.mark.parametrize("seed", variants(range(3), short=["0"]))
def test_random_acts_break_nothing_and_are_replayed(make: Callable[..., Settings], seed: int) -> None:
    """With few slots: slots, numbers, hold-outs and adapters agree after every step, and deaths change no bit."""
    rng = Random(seed)
    tasks = ["animals", "sums", "cities"]
    lines: list[bytes] = []
    for _ in range(4):
        pair = rng.sample(tasks, 2)
        lines += in_turns(*pair, per_task=30) if rng.random() < 0.4 else stream(pair[0], per_task=60)
    shape = {"shift": {"max_regimes": 3}, "adapter": {"num_heads": 4, "max_in_memory": 2}}
    acts = {at: random_act(seed, at) for at in sorted(rng.sample(range(4, len(lines) // 4), 14))}
    whole, components = operate(make(lines, "whole", **shape), {**acts}, check=assert_consistent)
    deaths = sorted(rng.sample(range(4, len(lines) // 4), 3))
    state, again = die_and_go_on(make(lines, "killed", **shape), {**acts}, deaths)
    assert differences(whole, state) == []
    assert regimes_of(again) == regimes_of(components)


def random_act(seed: int, at: int) -> Act:
    """Freeze, unfreeze, rename or drop one of the regimes that there are then."""

    def act(daemon: Daemon) -> None:
        rng, adaptation = Random(seed * 1000 + at), daemon.adaptation
        number = rng.choice(sorted(adaptation.numbers.values()))
        kind = rng.choice(["freeze", "unfreeze", "rename", "drop", "drop"])
        if kind == "rename":
            daemon.adaptation.rename(number, f"name {at}")
        else:
            getattr(daemon.adaptation, kind)(number)

    return act
