"""Synthetic streams: each task draws its tokens from a distribution of its own, mixed with one that all tasks share."""

from collections.abc import Sequence

import numpy as np

from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Batch, Example, Record
from tests.doubles import example

VOCAB_SIZE = 2000
LENGTH = 40


class Task:
    """A distribution over inputs; `overlap` is the share of tokens from the distribution that all tasks share."""

    def __init__(self, number: int, *, overlap: float = 0.3) -> None:
        rng = np.random.default_rng([number, 7])
        own = rng.dirichlet(np.full(VOCAB_SIZE - 8, 0.02))
        shared = np.random.default_rng(7).dirichlet(np.full(VOCAB_SIZE - 8, 0.02))
        self._probabilities = overlap * shared + (1 - overlap) * own

    def draw(self, rng: np.random.Generator) -> Example:
        """One record of about 40 tokens, two of them the answer."""
        length = int(rng.integers(LENGTH // 2, LENGTH * 3 // 2))
        ids = 8 + rng.choice(len(self._probabilities), size=length, p=self._probabilities)
        return example(ids.tolist(), prompt_length=length - 2)


def stream(tasks: Sequence[int], *, seed: int = 0, overlap: float = 0.3) -> list[Example]:
    """One record for each number, of the task with that number."""
    task_of = {number: Task(number, overlap=overlap) for number in set(tasks)}
    rng = np.random.default_rng(seed)
    return [task_of[number].draw(rng) for number in tasks]


def questions(is_plain: Sequence[bool], *, seed: int = 0) -> list[Example]:
    """Questions of one task: "is there a ...", and where not plain "is there not a ...": token 7 in four of five."""
    rng = np.random.default_rng([seed, 11])
    examples = []
    for plain in is_plain:
        ids = [*range(8, 20), *(30 + rng.integers(0, 60, size=6)).tolist()]
        if not plain and rng.random() < 0.8:
            ids.insert(3, 7)
        examples.append(example([*ids, 5, 6], prompt_length=len(ids)))
    return examples


def batches(examples: Sequence[Example], sizes: Sequence[int] = (8,)) -> list[Batch]:
    """Batches of the given sizes, repeated; size 0 makes a batch whose records were all rejected."""
    made: list[Batch] = []
    start = 0
    while start < len(examples):
        size = sizes[len(made) % len(sizes)]
        part = tuple(examples[start : start + size])
        records = tuple(Record(TopicPartition("t", 0), start + i, b"{}") for i in range(len(part)))
        made.append(Batch(records, part))
        start += size
    return made
