"""Training for a few steps; token losses and greedy generation by definition."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from streamlearn.learner.learner import Learner
from streamlearn.stream.record import IGNORED, Example
from tests.doubles import random_examples


def train(learner: Learner, steps: Sequence[int]) -> list[float]:
    return [learner.step(random_examples([8, 5], seed=step)).loss for step in steps]


@torch.no_grad()
def token_losses(model: Any, example: Example) -> tuple[list[float], list[bool]]:
    """Loss in nats of each learned token, and whether it is the most likely, from a pass over this record only."""
    ids, labels = torch.from_numpy(example.input_ids).long(), example.labels.tolist()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    learned = [(logits[t - 1], labels[t]) for t in range(1, len(ids)) if labels[t] != IGNORED]
    losses = [-F.log_softmax(row, dim=-1)[label].item() for row, label in learned]
    return losses, [int(row.argmax()) == label for row, label in learned]


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
