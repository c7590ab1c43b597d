"""What a method may do besides training on a batch."""

from collections.abc import Sequence

from streamlearn.learner.learner import Learner, Step
from streamlearn.stream.decode import Example


class Baseline:
    """Sequential training, nothing else: what every other method is compared with (SeqLoRA for one LoRA)."""

    def __init__(self, learner: Learner, *, seed: int) -> None:
        self.learner = learner
        self.seed = seed

    def begin(self, stretch: int, examples: Sequence[Example]) -> None:
        """A stretch begins; `examples` are all its records."""
        del stretch, examples
        if self.learner.stages is not None:
            self.learner.stages.restart()

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on one batch; the step's losses are of these records, before the update."""
        return self.learner.step(examples)

    def end(self, stretch: int, examples: Sequence[Example]) -> None:
        """The stretch is over."""
