"""What the daemon is changed into for comparison."""

from types import SimpleNamespace
from typing import Any

import torch

from streamlearn.bench.learn import variants
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from tests.doubles import random_examples
from tests.learners import MakeLearner


def test_plain_adamw_moves_experts_that_got_nothing(make_learner: MakeLearner) -> None:
    """By weight decay alone, where the masked optimizer keeps every bit."""
    moved = {}
    for plain in (False, True):
        learner = make_learner(preset="mh-moe", weight_decay=0.1)
        if plain:
            components: Any = SimpleNamespace(learner=learner)
            variants.plain_adamw(components)
        before = [bank.A.detach().clone() for bank in learner.banks]
        learner.step(random_examples((2,)))
        idle = [bank.load_HK == 0 for bank in learner.banks if bank.load_HK is not None]
        assert any(each.any() for each in idle)
        moved[plain] = [
            not torch.equal(bank.A[each], old[each])
            for bank, each, old in zip(learner.banks, idle, before, strict=True)
            if each.any()
        ]
    assert not any(moved[False])
    assert all(moved[True])


def test_one_bias_a_stretch_forgets_whose_a_record_is() -> None:
    """Records have the slot of the regime entered last; a shift of the answers enters none."""

    def shift(slot: int, kind: Any = "inputs") -> Shift:
        return Shift(kind, 1, slot + 1, slot, False, None, 1, 1, 0.0, 0.0)

    batch = Batch((), random_examples((2, 2)))
    decided = [
        AssignedBatch(batch, (0, 0), (shift(0),)),
        AssignedBatch(batch, (0, 2), (shift(1),)),
        AssignedBatch(batch, (2, 0), (shift(2, "answers"),)),
    ]
    monitor = SimpleNamespace(look=lambda _: decided[:2], flush=lambda: decided[2:])
    components: Any = SimpleNamespace(adaptation=SimpleNamespace(monitor=monitor))
    variants.one_bias_a_stretch(components)
    assert [assigned.slots for assigned in [*monitor.look(batch), *monitor.flush()]] == [(0, 0), (1, 1), (1, 1)]
