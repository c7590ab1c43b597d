"""Ranks for any backbone."""

from pathlib import Path

import pytest

from benchmarks.learn.arms import read_arm
from benchmarks.learn.methods import ABLATIONS, METHODS
from benchmarks.learn.profile import Profile
from benchmarks.learn.ranks import fill
from streamlearn.adapters.check import activated_parameters
from streamlearn.adapters.presets import resolve
from streamlearn.backbone.load import outline
from streamlearn.daemon.model import adapter_of
from streamlearn.settings import AdapterSettings, BackboneSettings

SMOLLM2 = {
    f"layers.{layer}.{name}": shape
    for layer in range(30)
    for name, shape in {
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (576, 192),
        "self_attn.v_proj": (576, 192),
        "self_attn.o_proj": (576, 576),
        "mlp.gate_proj": (576, 1536),
        "mlp.up_proj": (576, 1536),
        "mlp.down_proj": (1536, 576),
    }.items()
}
NANO = dict(outline(BackboneSettings()).linears)
CEILINGS = {"joint", "joint-3"}


@pytest.mark.parametrize("linears", [SMOLLM2, NANO], ids=["smollm2", "nano"])
@pytest.mark.parametrize("name", [*METHODS, *ABLATIONS])
def test_methods_activate_as_many_parameters(name: str, linears: dict[str, tuple[int, int]], tmp_path: Path) -> None:
    """Within an eighth: LoRAMoE's six experts of rank 3 are one tenth fewer than a LoRA of rank 20."""
    arm = fill({**METHODS, **ABLATIONS}[name].arm, linears, segments=1, regimes=4)
    config = adapter_of(read_arm(arm, Profile("", ""), seed=0, state=tmp_path, stream=tmp_path).settings)
    found = activated_parameters(config, linears)
    reference = activated_parameters(resolve(AdapterSettings()), linears)
    if name in CEILINGS:
        reference *= 4  # regimes, each with an adapter
    assert abs(found / reference - 1) < 1 / 8, arm
    assert config.scaling == 2


def test_blocks_multiply_the_rank() -> None:
    """One LoRA of the common rank for each segment."""
    arm = fill(METHODS["o-lora"].arm, SMOLLM2, segments=8, regimes=5)
    assert arm == "lora:adapter.rank=160:adapter.alpha=320:baseline.rank=20"
