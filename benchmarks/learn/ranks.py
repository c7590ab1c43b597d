"""Ranks at which methods of different shapes have equally many parameters, for any backbone.

An arm may contain:

| placeholder | stands for |
|---|---|
| {rank}, {alpha} | the rank at which this arm activates as many parameters as preset `streamlearn`; alpha is twice it |
| {stored}, {stored_alpha} | the rank at which this arm stores as many as `streamlearn` does for these regimes |
| {blocks}, {blocks_alpha} | {rank} times the number of segments: one LoRA per segment, side by side |

Parameters are those of A and B in the linears that the arm adapts, without routers. alpha is always twice the rank, as
in the preset, so that all methods have the same scaling.
"""

from dataclasses import replace
from pathlib import Path

from benchmarks.learn.arms import read_arm
from benchmarks.learn.profile import Profile
from streamlearn.adapters.check import LinearShapes, activated_parameters
from streamlearn.adapters.presets import HeadLoraConfig, resolve
from streamlearn.daemon.model import adapter_of
from streamlearn.settings import AdapterSettings

ALPHA_PER_RANK = 2


def fill(arm: str, linears: LinearShapes, *, segments: int, regimes: int) -> str:
    """Return the arm without placeholders.

    Args:
        arm: An arm, see `arms`.
        linears: The backbone's linears, name -> (in features, out features).
        segments: Number of segments of the stream.
        regimes: Number of different sets of tasks among them.
    """
    ones = dict.fromkeys(("rank", "alpha", "stored", "stored_alpha", "blocks", "blocks_alpha"), 1)
    unused = Path("unused")
    shape = adapter_of(read_arm(arm.format(**ones), Profile("", ""), seed=0, state=unused, stream=unused).settings)
    reference = resolve(AdapterSettings())
    rank = _ratio(reference, shape, linears)
    ranks = {
        "rank": rank,
        "stored": regimes * _ratio(replace(reference, top_k=None), replace(shape, top_k=None), linears),
        "blocks": rank * segments,
    }
    alphas = {f"{name}_alpha": ALPHA_PER_RANK * value for name, value in ranks.items()}
    return arm.format(**ranks, alpha=alphas.pop("rank_alpha"), **alphas)


def _ratio(reference: HeadLoraConfig, shape: HeadLoraConfig, linears: LinearShapes) -> int:
    """Rank at which `shape` has as many parameters as `reference`, at least 1."""
    one = activated_parameters(replace(shape, r=1), linears)
    return max(1, round(activated_parameters(reference, linears) / one))
