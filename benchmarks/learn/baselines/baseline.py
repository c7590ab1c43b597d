"""The base class of all methods that are given the task boundaries."""

from collections.abc import Sequence

from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.record import Example


class Baseline:
    """Sequential training without any further mechanism (SeqLoRA when the adapter is one LoRA)."""

    def __init__(self, learner: Learner, *, seed: int) -> None:
        self.learner = learner
        self.seed = seed

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Start a segment; `examples` are all its records."""
        del examples
        self.learner.hooks.enter(segment)

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on one batch and return the losses of these records from before the update."""
        return self.learner.step(examples)

    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """End a segment; `examples` are all its records."""
