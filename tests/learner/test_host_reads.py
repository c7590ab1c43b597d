"""A step reads from the device twice at most, however many banks, regimes and adapters there are."""

from collections import Counter

import pytest
import torch

from benchmarks.speed_arms import counting_host_reads
from streamlearn.learner.learner import Learner
from tests.doubles import random_examples
from tests.learners import MakeLearner

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
@pytest.mark.parametrize("slots", [None, [0, 0, 0, 0], [0, 1, 0, 2]], ids=["none", "one regime", "three regimes"])
def test_a_step_reads_twice_at_most(make_learner: MakeLearner, preset: str, slots: list[int] | None) -> None:
    """For every preset, and whether or not its records are of several regimes."""
    learner = make_learner(preset=preset)
    if learner.per_regime:
        for slot in range(3):
            learner.add_regime(slot, seed=slot)
    elif slots is not None and preset not in {"cp-moe", "streamlearn-routed"}:
        slots = None
    assert reads_of_a_step(learner, slots).total() <= MOST


@pytest.mark.parametrize("preset", ["streamlearn", "mh-moe", "mot"])
def test_computing_layers_again_reads_nothing_more(make_learner: MakeLearner, preset: str) -> None:
    """Checkpointing activations costs time on the device only."""
    learner = make_learner(preset=preset, activation_checkpointing=True)
    assert reads_of_a_step(learner, [0, 1, 0, 2] if learner.per_regime else None).total() <= MOST


def test_parts_of_a_batch_are_read_together(make_learner: MakeLearner) -> None:
    """Each further pass adds one read, that of transformers."""
    parts = 4
    assert reads_of_a_step(make_learner(preset="mh-moe"), None, parts=parts).total() <= MOST + parts - 1


def test_every_kind_of_read_is_counted() -> None:
    """The counter itself: values, lists, copies, shapes that depend on values, masks."""
    x = torch.arange(4.0)
    with counting_host_reads() as counts:
        float(x[0])
        bool(x[1] > 0)
        x.tolist()
        x.numpy()
        x.nonzero()
        x[x > 1]
        x[x > 1] = 0.0
        torch.bincount(x.long())
        x + 1
    assert counts == {
        "_local_scalar_dense": 2,
        "tolist": 1,
        "numpy": 1,
        "nonzero": 1,
        "index by a mask": 1,
        "index_put_ by a mask": 1,
        "bincount": 1,
    }
