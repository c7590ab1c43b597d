"""Experience replay with a tiny episodic memory.

Each batch is joined by as many records from the memory as it has itself; the memory is a uniform sample of everything
seen so far (reservoir sampling). Chaudhry et al. 2019, "On Tiny Episodic Memories in Continual Learning", algorithm 1.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.decode import Example

CAPACITY = 80
"""Records: ten for each task of a suite of eight."""


class Replay(Baseline):
    """See above."""

    def __init__(self, learner: Learner, *, seed: int, capacity: int = CAPACITY) -> None:
        super().__init__(learner, seed=seed)
        self.memory: list[Example] = []
        self._capacity = capacity
        self._seen = 0
        self._random = random.Random(seed)

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on the batch and on a draw from the memory, which then takes the batch in."""
        drawn = self._random.sample(self.memory, min(len(examples), len(self.memory)))
        step = self.learner.step([*examples, *drawn])
        for example in examples:
            self._take(example)
        own = len(examples)
        return replace(step, record_losses=step.record_losses[:own], record_correct=step.record_correct[:own])

    def _take(self, example: Example) -> None:
        self._seen += 1
        if len(self.memory) < self._capacity:
            self.memory.append(example)
        elif (place := self._random.randrange(self._seen)) < self._capacity:
            self.memory[place] = example
