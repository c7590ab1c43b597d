"""Regimes given: a preset that enters, probes and consolidates, told when, and told each test record's regime."""

from collections.abc import Sequence

from streamlearn.adaptation.adaptation import Adaptation
from streamlearn.bench.learn.baselines.baseline import Baseline
from streamlearn.learner.learner import Learner, Step
from streamlearn.shift.shift import Shift
from streamlearn.stream.decode import Example


class RegimesGiven(Baseline):
    """What the preset would do if it never missed a boundary, never saw a false one and never misplaced a record."""

    def __init__(
        self, learner: Learner, *, seed: int, adaptation: Adaptation, warmup_tokens: int, slots: Sequence[int]
    ) -> None:
        super().__init__(learner, seed=seed)
        self._adaptation = adaptation
        self._warmup_tokens = warmup_tokens
        self._slots = slots
        """Each stretch's regime; stretches of the same tasks share one."""
        self._slot = 0

    def begin(self, stretch: int, examples: Sequence[Example]) -> None:
        """Enter the stretch's regime, with a probe of its first records where it is new."""
        before, self._slot = self._slot, self._slots[stretch]
        shift = Shift(
            kind="inputs",
            number=stretch + 1,
            regime=self._slot + 1,
            slot=self._slot,
            known=self._slot in self._slots[:stretch],
            previous=before + 1 if stretch else None,
            declared_at=0,
            onset=0,
            statistic=0.0,
            threshold=0.0,
        )
        self._adaptation.enter(shift, self._first(examples))

    def step(self, examples: Sequence[Example]) -> Step:
        """Train with the regime's own bias."""
        return self.learner.step(examples, [self._slot] * len(examples))

    def _first(self, examples: Sequence[Example]) -> list[Example]:
        taken: list[Example] = []
        while len(taken) < len(examples) and sum(map(len, taken)) < self._warmup_tokens:
            taken.append(examples[len(taken)])
        return taken
