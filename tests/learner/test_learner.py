"""The training step: what it reports, what it changes, and when it changes nothing."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.speed_arms import counting_host_reads
from streamlearn.adapters.context import routing_context
from streamlearn.adapters.presets import PRESETS, regime_adapter
from streamlearn.adapters.tuner import SHARED
from streamlearn.learner.learner import Learner, Rehearsal
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import Batch
from tests.doubles import random_examples
from tests.learner.reference import token_losses
from tests.learners import REGIMES, MakeLearner, restore, same, snapshot


def batch_of(*lengths: int, seed: int = 0) -> Batch:
    return Batch((), random_examples(lengths or (9, 4, 6), seed=seed))


def mean_loss(learner: Learner, batch: Batch) -> float:
    packed = pack(batch.examples, learner.device)
    with torch.no_grad(), routing_context(learner.model, packed.context()):
        return float(packed_loss(learner.forward, packed).mean)


def train(learner: Learner, steps: Sequence[int]) -> list[float]:
    """Train one batch per step, drawn from the step's number; return the losses."""
    torch.manual_seed(0)  # mot's exploration noise is drawn from torch's own generator
    return [learner.step(batch_of(8, 5, seed=step).examples).loss for step in steps]


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_reported_loss_is_of_the_weights_before_the_update(make_learner: MakeLearner, preset: str) -> None:
    """Test, then train: the loss of a step is computed before the step changes the weights."""
    learner = make_learner(preset=preset)
    for bank in learner.banks:
        bank.layer.head_lora_config[bank.adapter].noise = 0.0  # it applies in training only
    for _ in range(3):
        before = mean_loss(learner, batch_of())
        assert learner.step(batch_of().examples).loss == pytest.approx(before, rel=1e-5)
        assert mean_loss(learner, batch_of()) < before * 0.999


def test_a_step_reports_each_records_loss(make_learner: MakeLearner) -> None:
    """Figures of a packed batch equal those of each record separately, also after some updates."""
    learner = make_learner()
    train(learner, range(4))
    batch = Batch((), random_examples([9, 2, 6], prompt_length=1) + random_examples([12], prompt_length=7))
    expected = [token_losses(learner.forward, example)[0] for example in batch.examples]
    step = learner.step(batch.examples)
    assert step.record_losses == pytest.approx([sum(losses) / len(losses) for losses in expected], rel=1e-4)
    assert step.loss == pytest.approx(sum(map(sum, expected)) / sum(map(len, expected)), rel=1e-4)
    assert (step.number, step.tokens, step.learned_tokens) == (5, 29, 8 + 1 + 5 + 5)
    assert step.refusal is None


def test_only_experts_that_got_a_token_move(make_learner: MakeLearner) -> None:
    """After a step with few tokens, exactly the experts that were routed to have changed."""
    learner = make_learner()
    train(learner, range(5))
    before = snapshot(learner)
    learner.step(batch_of(2, seed=77).examples)
    kept = 0
    for group in learner.optimizer.groups:
        if group.load_HK is None:
            continue
        routed_HK = group.load_HK > 0
        for name in group.moments:
            moved = (group.moments[name] != before[f"optimizer.{group.name}.{name}"]).flatten(2).any(-1)
            assert torch.equal(moved, routed_HK)
        kept += int((~routed_HK).sum())
    assert kept > 0  # two tokens cannot reach every expert
    after = snapshot(learner)
    for bank in learner.banks:
        assert bank.load_HK is not None
        for part in "AB":
            name = f"{SHARED}: base_model.model.{bank.linear}.head_lora_{part}"
            assert torch.equal((after[name] != before[name]).flatten(2).any(-1), bank.load_HK > 0)


def spoil_hidden_states(change: Callable[[Tensor, Learner], Tensor]) -> Callable[[Learner], Any]:
    """Change what the decoder hands to the output linear: a step makes no logits of a whole batch to change."""

    def spoil(learner: Learner) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> Any:
            output["last_hidden_state"] = change(output["last_hidden_state"], learner)
            return output

        return learner.forward.model.register_forward_hook(hook)

    return spoil


def not_a_number(hidden: Tensor, learner: Learner) -> Tensor:
    return hidden * torch.nan


def impossible(hidden: Tensor, learner: Learner) -> Tensor:
    """Let logits come so near to the largest float32 that the sum of the tokens' losses is infinite."""
    logits: Tensor = hidden @ learner.forward.lm_head.weight.T
    return hidden * (0.9 * torch.finfo(torch.float32).max / logits.abs().max())


def spoil_gradient(learner: Learner) -> Any:
    return learner.optimizer.parameters()[0].register_hook(lambda gradient: gradient + torch.inf)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (spoil_hidden_states(not_a_number), "loss is nan"),
        (spoil_hidden_states(impossible), "loss is inf"),
        (spoil_gradient, "gradient norm is inf"),
    ],
    ids=["nan loss", "infinite loss", "infinite gradient"],
)
def test_a_non_finite_step_changes_no_bit(
    make_learner: MakeLearner, spoil: Callable[[Learner], Any], refusal: str
) -> None:
    """A loss or gradient that is not finite ends the step: only its number is counted."""
    learner, twin = make_learner(), make_learner()
    for one in (learner, twin):
        train(one, range(3))
    before = snapshot(learner)
    spoiled = spoil(learner)
    step = learner.step(batch_of(seed=99).examples)
    spoiled.remove()
    assert step.refusal == refusal
    assert math.isfinite(step.loss) == (refusal == "gradient norm is inf")
    after = snapshot(learner)
    assert after.pop("learner.counts").tolist() == [4, 3]
    before.pop("learner.counts")
    assert same(before, after)
    train(learner, [3])
    train(twin, [3])
    ends = [snapshot(learner), snapshot(twin)]
    assert [end.pop("learner.counts").tolist() for end in ends] == [[5, 4], [4, 4]]
    assert same(*ends)  # the refused step left no gradients


def test_gradients_are_clipped_to_a_global_norm(make_learner: MakeLearner) -> None:
    """After one step the first moment is (1 - beta1) times a gradient of that norm; the reported norm is unclipped."""
    learner = make_learner(max_grad_norm=1e-3)
    step = learner.step(batch_of().examples)
    moments = [m for group in learner.optimizer.groups for name, m in group.moments.items() if name.endswith("exp_avg")]
    norm = torch.cat([moment.flatten() for moment in moments]).norm() / (1 - 0.9)
    torch.testing.assert_close(norm.item(), 1e-3, rtol=1e-3, atol=0)
    assert step.grad_norm > 0.1


@pytest.mark.parametrize(
    ("warmup_steps", "factors"), [(0, [1.0, 1.0, 1.0]), (1, [1.0, 1.0, 1.0]), (4, [0.25, 0.5, 0.75, 1.0, 1.0])]
)
def test_the_rate_rises_over_the_warmup(
    make_learner: MakeLearner, warmup_steps: int, factors: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear in the number of updates, from lr / warmup to lr; a refused step does not count."""
    learner = make_learner(warmup_steps=warmup_steps, lr=0.5)
    rates: list[float] = []
    monkeypatch.setattr(learner.optimizer, "step", rates.append)
    for i in range(len(factors)):
        if i == 1:
            spoiled = spoil_gradient(learner)
            assert learner.step(batch_of().examples).refusal
            spoiled.remove()
        learner.step(batch_of().examples)
    assert rates == pytest.approx([0.5 * factor for factor in factors])


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_same_batches_give_the_same_bits(make_learner: MakeLearner, preset: str) -> None:
    """Two learners with the same seed end bit-equal; another seed does not."""
    one, two, other = make_learner(preset=preset), make_learner(preset=preset), make_learner(preset=preset, seed=1)
    assert train(one, range(4)) == train(two, range(4))
    train(other, range(4))
    assert same(snapshot(one), snapshot(two))
    assert not same(snapshot(one), snapshot(other))


def test_a_frozen_router_stays_and_a_slow_one_moves_less(make_learner: MakeLearner) -> None:
    """`router_lr` scales the learning rate of the routers only."""
    examples = random_examples([9, 7, 8], prompt_length=4)
    distances = []
    for factor in (0.0, 0.1, 1.0):
        learner = make_learner(preset="mh-moe", changes={"router_lr": factor}, weight_decay=0.0)
        before = [b.router.detach().clone() for b in learner.banks if b.router is not None]
        learner.step(examples)
        after = [b.router.detach() for b in learner.banks if b.router is not None]
        distances.append(sum(float((a - b).norm()) for a, b in zip(after, before, strict=True)))
    assert distances[0] == 0.0
    assert distances[1] == pytest.approx(distances[2] / 10, rel=1e-4)


@pytest.mark.parametrize("preset", ["streamlearn", "cp-moe", "mot", "loramoe"])
def test_every_preset_goes_on_from_a_saved_state_bit_for_bit(make_learner: MakeLearner, preset: str) -> None:
    """Also during warm-up, and with biases, path integrals, stages and dropout."""
    straight, resumed = (make_learner(preset=preset, warmup_steps=6, dropout=0.2) for _ in range(2))
    torch.manual_seed(1)
    for seed in range(3):
        straight.step(random_examples([8, 5], prompt_length=3, seed=seed), [0, 1])
    straight.skip_step()  # a number without an update: the two counts differ
    saved, rng_state = snapshot(straight), torch.get_rng_state()
    restore(resumed, saved)
    ends = []
    for learner in (straight, resumed):
        torch.set_rng_state(rng_state)
        learner.step(random_examples([8, 5], prompt_length=3, seed=9), [1, 0])
        ends.append(snapshot(learner))
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []


def test_a_penaltys_gradient_is_added_and_its_value_is_not_reported(make_learner: MakeLearner) -> None:
    """The norm is that of the sum of both gradients; the loss is that of the batch."""
    batch = batch_of()
    plain = make_learner(preset="lora", max_grad_norm=1e9).step(batch.examples)
    learner = make_learner(preset="lora", max_grad_norm=1e9)
    slope = 100.0
    step = learner.step(batch.examples, penalty=lambda: slope * learner.banks[0].A.sum())
    added = slope * math.sqrt(learner.banks[0].A.numel())
    assert step.loss == plain.loss
    assert step.grad_norm == pytest.approx(math.hypot(plain.grad_norm, added), rel=1e-4)  # dL/dA is zero while B is


def test_a_record_is_measured_as_a_step_measures_it(make_learner: MakeLearner) -> None:
    """Also in several parts; nothing changes, and each part is announced."""
    learner = make_learner(preset="streamlearn")
    learner.step(batch_of(seed=1).examples, [0, 1, 1])
    before, announced = snapshot(learner), list[int]()
    measured = learner.measure(batch_of().examples, [0, 1, 1])
    in_parts = learner.measure(batch_of().examples, [0, 1, 1], parts=3, on_record=announced.append)
    assert same(before, snapshot(learner))
    assert announced == [0, 1, 2]
    assert in_parts == pytest.approx(measured, rel=1e-5)
    assert measured == pytest.approx(learner.step(batch_of().examples, [0, 1, 1]).record_losses, rel=1e-5)


@pytest.mark.parametrize("slot", [0, 2], ids=["active in PEFT", "another"])
def test_a_regime_is_removed_and_the_others_train_on(make_learner: MakeLearner, slot: int) -> None:
    """With the bits of a learner that still has it."""
    batch, whole, removed = batch_of(), make_learner(preset="streamlearn"), make_learner(preset="streamlearn")
    removed.remove_regime(slot)
    for learner in (whole, removed):
        learner.step(batch.examples, [1, 3, 1])
    kept, all_of = snapshot(removed), snapshot(whole)
    name = regime_adapter(slot)
    assert {key for key in all_of if name in key} == all_of.keys() - kept.keys()
    assert same(kept, {key: all_of[key] for key in kept})
    assert name not in removed.model.peft_config


def test_without_a_regime_one_untrained_adapter_is_left(make_learner: MakeLearner) -> None:
    """As in a new run; a regime that comes replaces it."""
    learner = make_learner(preset="streamlearn")
    learner.step(batch_of().examples, [3, 0, 3])
    for slot in (0, 1, 2, 3):
        learner.remove_regime(slot)
    assert list(learner.revisions) == [regime_adapter(0)]
    assert not any(bank.B.any() for bank in learner.banks)
    learner.add_regime(0, seed=5)
    assert learner.step(batch_of().examples, [0, 0, 0]).refusal is None
    assert all(bank.B.any() for bank in learner.banks)


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    return make_learner(preset="streamlearn")


def content(learner: Learner, adapter: str) -> list[Tensor]:
    """Copies of an adapter's weights and moments."""
    weights = [p for bank in learner.banks if bank.adapter == adapter for p in (bank.A, bank.B)]
    return [tensor.detach().clone() for tensor in (*weights, *learner.moments(adapter).values())]


def changed_by(learner: Learner, act: object) -> tuple[set[str], set[str]]:
    """The adapters whose content and whose revision `act` changed; one that is new has both."""
    assert callable(act)
    before = {name: (content(learner, name), revision) for name, revision in learner.revisions.items()}
    act()
    in_content, in_revision = set(), set()
    for name, revision in learner.revisions.items():
        old, old_revision = before.get(name, ([], -1))
        new = content(learner, name)
        if len(old) != len(new) or not all(map(torch.equal, old, new)):
            in_content.add(name)
        if revision != old_revision:
            in_revision.add(name)
    return in_content, in_revision


def names(*slots: int) -> set[str]:
    return {regime_adapter(slot) for slot in slots}


@pytest.mark.parametrize("slots", [[1, 1], [0, 2], [2, 1], [-1, 1]])
def test_a_step_changes_the_adapters_of_its_regimes(learner: Learner, slots: list[int]) -> None:
    """Weights, moments and revisions of these, and of no other."""
    examples = random_examples([9, 12], prompt_length=2)
    expected = names(*(slot for slot in slots if slot >= 0))
    assert changed_by(learner, lambda: learner.step(examples, slots)) == (expected, expected)


def test_a_step_needs_the_adapters_of_its_regimes(learner: Learner) -> None:
    """A record of a regime that was never entered would be trained on in silence, and change nothing."""
    examples = random_examples([9, 12], prompt_length=2)

    def step() -> None:
        with pytest.raises(RuntimeError, match=f"no adapter \\['regime{REGIMES}'\\]"):
            learner.step(examples, [1, REGIMES])

    assert changed_by(learner, step) == (set(), set())


def test_a_regime_that_takes_a_slot_has_another_revision(learner: Learner) -> None:
    """Also right after a step of the one before, with no step in between."""
    learner.step(random_examples([9], prompt_length=2), [1])
    assert changed_by(learner, lambda: learner.add_regime(1, seed=7)) == (names(1), names(1))
    assert changed_by(learner, lambda: learner.add_regime(REGIMES, seed=7, start=0)) == (names(REGIMES), names(REGIMES))


def test_a_restored_state_has_another_revision(learner: Learner) -> None:
    """A rollback: what was saved in between is of the future."""
    state = snapshot(learner)
    learner.step(random_examples([9], prompt_length=2), [1])
    in_content, in_revision = changed_by(learner, lambda: restore(learner, state))
    assert in_content == names(1)
    assert in_revision == names(*range(REGIMES))


EXAMPLES = random_examples([9, 7, 8, 12], prompt_length=4)

MOST = 2

"""One is ours, one that of transformers in every forward pass (`find_packed_sequence_indices`)."""


def reads_of_a_step(learner: Learner, slots: list[int] | None, *, parts: int = 1) -> Counter[str]:
    learner.step(EXAMPLES, slots)  # the first one of a regime is not special, but a cache may be filled in it
    with counting_host_reads() as counts:
        step = learner.step(EXAMPLES, slots, parts=parts)
    assert step.refusal is None
    return counts


@pytest.mark.parametrize("preset", ["streamlearn", "streamlearn-routed", "mh-moe", "cp-moe", "mot", "lora", "loramoe"])
def test_a_step_reads_twice_at_most(make_learner: MakeLearner, preset: str) -> None:
    """For every preset, with records of several regimes where it routes by regime."""
    learner = make_learner(preset=preset)
    assert reads_of_a_step(learner, [0, 1, 0, 2] if learner.routes_by_regime else None).total() <= MOST


def rehearsing(make_learner: MakeLearner, **settings: Any) -> Learner:
    learner = make_learner(preset="streamlearn", **settings)
    learner.step(batch_of(seed=1).examples, [0, 1, 1])
    return learner


def test_further_updates_are_steps_on_the_same_batch(make_learner: MakeLearner) -> None:
    """Two updates a batch end with the bits of two steps; what is reported is the test before the first."""
    one, two = make_learner(preset="streamlearn"), make_learner(preset="streamlearn", updates_per_batch=2)
    first, _ = (one.step(batch_of().examples, [0, 1, 1]) for _ in range(2))
    step = two.step(batch_of().examples, [0, 1, 1])
    assert step == first
    assert (two.number, two.updates) == (1, 2)
    mine, other = snapshot(two), snapshot(one)
    assert mine.pop("learner.counts").tolist() != other.pop("learner.counts").tolist()
    assert same(mine, other)


def test_rehearsed_records_are_trained_on_and_not_reported(make_learner: MakeLearner) -> None:
    """The update is that of all records together; every figure of the step is of the batch's own."""
    batch, earlier = batch_of(), random_examples([7, 11], seed=5)
    rehearsed, joined, alone = (rehearsing(make_learner) for _ in range(3))
    step = rehearsed.step(batch.examples, [0, 1, 1], rehearsed=[Rehearsal(earlier, [1, 0])])
    joined.step([*batch.examples, *earlier], [0, 1, 1, 1, 0])
    assert same(snapshot(rehearsed), snapshot(joined))
    expected = alone.step(batch.examples, [0, 1, 1])
    assert not same(snapshot(rehearsed), snapshot(alone))
    assert step.loss == pytest.approx(expected.loss, rel=1e-5)
    assert step.record_losses == pytest.approx(expected.record_losses, rel=1e-5)
    for figure in ("number", "tokens", "learned_tokens", "record_correct", "refusal", "ended"):
        assert getattr(step, figure) == getattr(expected, figure)


def spoil_passes(learner: Learner, is_spoiled: Callable[[int, int], bool]) -> Any:
    """Make the loss of a pass not finite, by its number from 1 on and its tokens."""
    passes: list[int] = []

    def change(hidden: Tensor, _: Learner) -> Tensor:
        passes.append(1)
        return hidden * torch.nan if is_spoiled(len(passes), hidden.shape[1]) else hidden

    return spoil_hidden_states(change)(learner)


def test_a_further_update_that_is_not_finite_is_not_made(make_learner: MakeLearner) -> None:
    """The batch is trained on by the updates before it, and the step says why it ended."""
    spoiled, twin = rehearsing(make_learner, updates_per_batch=3), rehearsing(make_learner)
    twin.step(batch_of(seed=1).examples, [0, 1, 1])  # the rest of the other's first step
    twin.step(batch_of(seed=1).examples, [0, 1, 1])
    hook = spoil_passes(spoiled, lambda number, _: number == 2)
    step = spoiled.step(batch_of().examples, [0, 1, 1])
    hook.remove()
    assert (step.refusal, step.ended) == (None, "loss is nan")
    assert math.isfinite(step.loss)
    twin.step(batch_of().examples, [0, 1, 1])
    mine, other = snapshot(spoiled), snapshot(twin)
    assert (mine.pop("learner.counts").tolist(), other.pop("learner.counts").tolist()) == ([2, 4], [4, 4])
    assert same(mine, other)
    assert all(parameter.grad is None for parameter in spoiled.optimizer.parameters())


@pytest.mark.parametrize("is_own", [False, True], ids=["rehearsed", "own"])
def test_a_batch_is_refused_for_its_own_records_only(make_learner: MakeLearner, is_own: bool) -> None:
    """Where a rehearsed record is at fault, the update is made without rehearsed ones."""
    batch, rehearsal = batch_of(), Rehearsal(random_examples([7], seed=5), [1])
    spoiled, twin = rehearsing(make_learner), rehearsing(make_learner)
    hook = spoil_passes(spoiled, lambda _, tokens: is_own or tokens > batch.num_tokens)
    step = spoiled.step(batch.examples, [0, 1, 1], rehearsed=[rehearsal])
    hook.remove()
    assert step.refusal == ("loss is nan" if is_own else None)
    if not is_own:
        assert step == twin.step(batch.examples, [0, 1, 1])
    mine, other = snapshot(spoiled), snapshot(twin)
    for state in (mine, other):
        state.pop("learner.counts")
    assert same(mine, other)
