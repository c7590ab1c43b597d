"""MoT's three stages, scaled to the segment: each segment passes through all of them.

The paper's runs on text take 50, 150 and 100 of 300 epochs (arXiv 2605.29757, figures 5 and 6), that is 1/6, 1/2 and
1/3 of training; fixed numbers of steps would end in an earlier stage on a short segment.
"""

from collections.abc import Sequence

from benchmarks.learn.baselines.baseline import Baseline
from benchmarks.learn.segments import batches
from streamlearn.baselines.consolidate import BaselineHooks
from streamlearn.learner.learner import Learner
from streamlearn.settings import Settings
from streamlearn.stream.record import Example

FFN_SHARE = 1 / 6
"""Stage I's share of a segment's steps."""
ATTENTION_SHARE = 1 / 2
"""Stage II's share of a segment's steps."""


class StagedTraining(Baseline):
    """Plain training, with the stages' lengths set at the start of each segment."""

    def __init__(
        self,
        learner: Learner,
        *,
        seed: int,
        settings: Settings,
        ffn_share: float = FFN_SHARE,
        attention_share: float = ATTENTION_SHARE,
    ) -> None:
        super().__init__(learner, seed=seed)
        self._settings = settings
        self._shares = {"ffn_steps": ffn_share, "attention_steps": attention_share}

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Restart the stages; each has at least one step."""
        super().begin(segment, examples)
        hooks = self.learner.hooks
        assert isinstance(hooks, BaselineHooks), "the preset trains in stages"
        assert hooks.stages is not None, "the preset trains in stages"
        steps = sum(1 for _ in batches(examples, self._settings.stream))
        lengths = {name: max(1, round(share * steps)) for name, share in self._shares.items()}
        hooks.stages.settings = self._settings.learner.model_copy(update=lengths)
