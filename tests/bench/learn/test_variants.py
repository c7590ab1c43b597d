"""Variants of the daemon for ablations."""

from types import SimpleNamespace
from typing import Any

import torch

from streamlearn.bench.learn import variants
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
