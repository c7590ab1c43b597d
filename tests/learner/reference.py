"""Training for a few steps, and greedy generation by definition."""

from collections.abc import Sequence
from typing import Any

import torch

from streamlearn.learner.learner import Learner
from tests.doubles import random_examples


def train(learner: Learner, steps: Sequence[int]) -> list[float]:
    return [learner.step(random_examples([8, 5], seed=step)).loss for step in steps]


def greedy(model: Any, prompt: Sequence[int], limit: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """By definition: one forward pass per token, without cache or padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if best in stop:
            break
        ids.append(best)
    return ids[len(prompt) :]
