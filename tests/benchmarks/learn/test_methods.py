"""Arms, profiles and ranks of the methods."""

from dataclasses import replace
from pathlib import Path

from benchmarks.learn.methods import ABLATIONS, METHODS, Profile, fill, own_values, read_arm, read_profile
from streamlearn.adapters.presets import activated_parameters, resolve
from streamlearn.backbone.load import outline
from streamlearn.daemon.model import adapter_of
from streamlearn.settings import AdapterSettings, BackboneSettings

NANO = read_profile("nano")
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
CEILINGS = {"joint", "joint-3"}


def test_methods_activate_as_many_parameters(tmp_path: Path) -> None:
    """Within an eighth: LoRAMoE's six experts of rank 3 are one tenth fewer than a LoRA of rank 20."""
    for linears in (SMOLLM2, dict(outline(BackboneSettings()).linears)):
        for name, method in {**METHODS, **ABLATIONS}.items():
            arm = fill(method.arm, linears, segments=1, regimes=4)
            config = adapter_of(read_arm(arm, Profile("", ""), seed=0, state=tmp_path, stream=tmp_path).settings)
            reference = activated_parameters(resolve(AdapterSettings()), linears)
            if name in CEILINGS:
                reference *= 4  # regimes, each with an adapter
            assert abs(activated_parameters(config, linears) / reference - 1) < 1 / 8, arm
            assert config.scaling == 2


def test_an_ablation_takes_the_values_of_its_preset() -> None:
    """Except for those that it changes itself."""
    values = {"learner.lr": 0.5, "consolidate.anchor_strength": 3}
    profile = replace(NANO, methods={"streamlearn": values, "er": {"learner.lr": 0.1}})
    assert own_values("streamlearn", "streamlearn", profile) == values
    assert own_values("no probe", "streamlearn:probe.enabled=false", profile) == values
    off = "streamlearn:consolidate.anchor_strength=0"
    assert own_values("no consolidation", off, profile) == {"learner.lr": 0.5}
    assert own_values("er", "lora:adapter.rank=2", profile) == {"learner.lr": 0.1}
    assert own_values("gem", "lora", profile) == {}
