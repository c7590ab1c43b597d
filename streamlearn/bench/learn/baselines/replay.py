"""Experience replay with a tiny episodic memory.

Each batch is extended by as many records drawn from the memory. The memory is a uniform sample of all records seen so
far (reservoir sampling). Chaudhry et al. 2019, "On Tiny Episodic Memories in Continual Learning", algorithm 1.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.decode import Example

CAPACITY = 80
"""Records in the memory: ten per task in a suite of eight."""


class Replay(Baseline):
    """Experience replay from a reservoir sample."""

    def __init__(self, learner: Learner, *, seed: int, capacity: int = CAPACITY) -> None:
        super().__init__(learner, seed=seed)
        self.memory: list[Example] = []
        self._capacity = capacity
        self._seen = 0
        self._random = random.Random(seed)

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on the batch and on records drawn from the memory, then offer the batch to the memory."""
        drawn = self._random.sample(self.memory, min(len(examples), len(self.memory)))
        step = self.learner.step([*examples, *drawn])
        for example in examples:
            self._remember(example)
        own = len(examples)
        return replace(step, record_losses=step.record_losses[:own], record_correct=step.record_correct[:own])

    def _remember(self, example: Example) -> None:
        self._seen += 1
        if len(self.memory) < self._capacity:
            self.memory.append(example)
        elif (place := self._random.randrange(self._seen)) < self._capacity:
            self.memory[place] = example
