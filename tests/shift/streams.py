"""Streams of made-up tasks: each draws its words from a distribution of its own, some words are everybody's."""

from collections.abc import Sequence

import numpy as np

from streamlearn.stream.batch import Batch
from streamlearn.stream.decode import Example
from streamlearn.stream.record import Record, TopicPartition
from tests.doubles import example

VOCAB_SIZE = 2000
LENGTH = 40


class Task:
    """A distribution over inputs: `overlap` of the words come from a pool that all tasks share."""

    def __init__(self, number: int, *, overlap: float = 0.3) -> None:
        rng = np.random.default_rng([number, 7])
        own = rng.dirichlet(np.full(VOCAB_SIZE - 8, 0.02))
        shared = np.random.default_rng(7).dirichlet(np.full(VOCAB_SIZE - 8, 0.02))
        self._words = overlap * shared + (1 - overlap) * own

    def draw(self, rng: np.random.Generator) -> Example:
        """One record of about 40 tokens, two of them the answer."""
        length = int(rng.integers(LENGTH // 2, LENGTH * 3 // 2))
        ids = 8 + rng.choice(len(self._words), size=length, p=self._words)
        return example(ids.tolist(), prompt_length=length - 2)


def stream(tasks: Sequence[int], *, seed: int = 0, overlap: float = 0.3) -> list[Example]:
    """One record for each number, of the task with that number."""
    known = {number: Task(number, overlap=overlap) for number in set(tasks)}
    rng = np.random.default_rng(seed)
    return [known[number].draw(rng) for number in tasks]


def questions(asked: Sequence[bool], *, seed: int = 0) -> list[Example]:
    """One task's questions; where `asked` is false the word 7 is among them, in four of five: is there (not) a ..."""
    rng = np.random.default_rng([seed, 11])
    examples = []
    for plain in asked:
        words = [*range(8, 20), *(30 + rng.integers(0, 60, size=6)).tolist()]
        if not plain and rng.random() < 0.8:
            words.insert(3, 7)
        examples.append(example([*words, 5, 6], prompt_length=len(words)))
    return examples


def batches(examples: Sequence[Example], sizes: Sequence[int] = (8,)) -> list[Batch]:
    """Cut into batches whose sizes repeat `sizes`; 0 makes one whose records were all rejected."""
    made: list[Batch] = []
    start = 0
    while start < len(examples):
        size = sizes[len(made) % len(sizes)]
        part = tuple(examples[start : start + size])
        records = tuple(Record(TopicPartition("t", 0), start + i, b"{}") for i in range(len(part)))
        made.append(Batch(records, part))
        start += size
    return made
