"""Experience replay from a small memory.

Each batch is extended by as many records drawn from the memory. The memory is a uniform sample of all records seen so
far. Chaudhry et al. 2019, "On Tiny Episodic Memories in Continual Learning", algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.baselines.reservoir import Reservoir
from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example


class Replay(Baseline):
    """Experience replay from a reservoir sample of `capacity` records."""

    def __init__(self, learner: Learner, *, seed: int, capacity: int) -> None:
        super().__init__(learner, seed=seed)
        self.memory: Reservoir[Example] = Reservoir(capacity, seed=seed)

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on the batch and on records drawn from the memory, then offer the batch to the memory."""
        step = self.learner.step([*examples, *self.memory.draw(len(examples))])
        for example in examples:
            self.memory.offer(example)
        return only_first(step, len(examples))


def only_first(step: Step, num: int) -> Step:
    """Return the step with the losses of its first `num` records only: those of the stream."""
    return replace(step, record_losses=step.record_losses[:num], record_correct=step.record_correct[:num])
