"""Oracle regimes: entering, probing and consolidation at the true boundaries.

As `cp-moe`, simplified: it adapts the linears of the MLP and not those of attention; the stream is read once instead of
in five epochs, at a constant rate instead of a cosine; and the warm-up of the transient expert is as long as the
profile says (10,000 tokens in the paper).
"""

from collections.abc import Sequence

from benchmarks.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.regimes.regimes import Regimes
from streamlearn.shift.input_shift import Shift
from streamlearn.stream.record import Example


class OracleRegimes(Baseline):
    """A preset with perfect detection: no boundary missed, no false alarm, every record in its own regime."""

    def __init__(
        self, learner: Learner, *, seed: int, adaptation: Regimes, warmup_tokens: int, slots: Sequence[int]
    ) -> None:
        """`slots`: the regime slot of each segment; segments of the same tasks share one."""
        super().__init__(learner, seed=seed)
        self._adaptation = adaptation
        self._warmup_tokens = warmup_tokens
        self._slots = slots
        self._slot = 0

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Enter the segment's regime; a new regime is probed with the segment's first records."""
        before, self._slot = self._slot, self._slots[segment]
        shift = Shift(
            kind="inputs",
            number=segment + 1,
            regime=self._slot + 1,
            slot=self._slot,
            known=self._slot in self._slots[:segment],
            previous=before + 1 if segment else None,
            declared_at=0,
            onset=0,
            statistic=0.0,
            threshold=0.0,
        )
        self._adaptation.enter(shift, self._warmup(examples))

    def step(self, examples: Sequence[Example]) -> Step:
        """Train with the bias of the segment's regime."""
        return self.learner.step(examples, [self._slot] * len(examples))

    def _warmup(self, examples: Sequence[Example]) -> list[Example]:
        taken: list[Example] = []
        while len(taken) < len(examples) and sum(map(len, taken)) < self._warmup_tokens:
            taken.append(examples[len(taken)])
        return taken
