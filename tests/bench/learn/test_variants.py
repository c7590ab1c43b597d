"""Variants of the daemon for ablations."""

from types import SimpleNamespace
from typing import Any

import torch

from streamlearn.bench.learn import variants
from streamlearn.shift.lookahead import HeldBatch, Lookahead
from streamlearn.shift.shift import Shift
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Record, TopicPartition
from tests.doubles import random_examples
from tests.learners import MakeLearner


def test_plain_adamw_moves_experts_without_tokens(make_learner: MakeLearner) -> None:
    """Weight decay moves them, while the masked optimizer keeps them bit-equal."""
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


def test_one_bias_per_segment_overrides_each_records_regime() -> None:
    """Every record has the slot of the regime entered last; a concept drift does not enter one."""

    def shift(slot: int, kind: Any = "inputs") -> Shift:
        return Shift(kind, 1, slot + 1, slot, False, None, 1, 1, 0.0, 0.0)

    records = tuple(Record(TopicPartition("t", 0), offset, None) for offset in range(2))
    batch = Batch(records, random_examples((2, 2)))
    lookahead = Lookahead(num_records=0)
    components: Any = SimpleNamespace(adaptation=SimpleNamespace(monitor=SimpleNamespace(lookahead=lookahead)))
    variants.one_bias_per_segment(components)
    taken = []
    for first, slots, entered in ((1, [0, 0], shift(0)), (3, [0, 2], shift(1)), (5, [2, 0], shift(2, "answers"))):
        lookahead.append(HeldBatch(batch, first, slots, [entered]))
        lookahead.decide()
        taken.append(lookahead.take())
    assert [assigned and assigned.slots for assigned in taken] == [(0, 0), (1, 1), (1, 1)]
