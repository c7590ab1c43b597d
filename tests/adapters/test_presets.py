"""The presets' rows, the settings that override them, and the PEFT configuration."""

import re
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig

from streamlearn.adapters.presets import HeadLoraConfig, activated_parameters, objective, resolve
from streamlearn.errors import ConfigError
from streamlearn.settings import AdapterSettings, Settings

SHAPES = {"model.layers.0.mlp.gate_proj": (256, 640), "model.layers.0.mlp.up_proj": (256, 640)} | {
    "model.layers.0.mlp.down_proj": (640, 256)
}


def with_preset(preset: Any, **sections: Any) -> Settings:
    adapter = {"preset": preset, **sections.pop("adapter", {})}
    return Settings.model_validate({"source": {"jsonl": {"path": "x.jsonl"}}, "adapter": adapter, **sections})


def test_objectives_are_the_papers_rows() -> None:
    """CP-MoE section 4: alpha 0.2, gamma 0.1, lambda in our scale; LoRAMoE 4.1: beta 0.1; MoT: three stages."""
    cp_moe, loramoe, mot = (objective(with_preset(preset)) for preset in ("cp-moe", "loramoe", "mot"))
    assert (cp_moe.bias, cp_moe.bias_strength) == ("soft", 0.2)
    assert (cp_moe.anchor_strength, cp_moe.balance_strength) == (10.0, 0.1)
    assert (cp_moe.importance, cp_moe.accumulation) == ("transient", "sum")
    assert objective(with_preset("mh-cp-moe")) == cp_moe
    assert [resolve(AdapterSettings(preset=preset)).dropout for preset in ("cp-moe", "loramoe", "lora")] == [
        0.1,
        0.05,
        0,
    ]
    assert (loramoe.localized_balance, mot.staged) == (0.1, True)
    assert cp_moe.compares
    assert not objective(with_preset("mh-moe")).compares


def test_settings_override_the_objective() -> None:
    """A given setting overrides the preset, in any section."""
    settings = with_preset(
        "mh-moe",
        adapter={"bias": "soft"},
        learner={"router_lr": 0.0, "balance_strength": 0.3},
        consolidate={"anchor_strength": 7.0},
    )
    result = objective(settings)
    assert (result.bias, result.bias_strength) == ("soft", 0.2)
    assert (result.router_lr, result.balance_strength, result.anchor_strength) == (0.0, 0.3, 7.0)


def test_a_mean_needs_adapters_to_average() -> None:
    """Before the daemon answers the first request that nothing explains."""
    with pytest.raises(
        ConfigError, match=r"serve.unknown: mean averages the adapters of regimes, and here all regimes"
    ):
        objective(with_preset("lora", serve={"unknown": "mean"}))
    assert objective(with_preset("streamlearn", serve={"unknown": "mean"})).bias == "none"


def test_a_bias_needs_a_router() -> None:
    """Preset `lora` has none."""
    with pytest.raises(ConfigError, match=re.escape("adapter.bias: preset lora has no router to bias")):
        objective(with_preset("lora", adapter={"bias": "soft"}))


@pytest.mark.parametrize(
    ("preset", "adapter", "how"),
    [
        ("streamlearn", {}, "set it to 0 or adapter.num_experts above 1"),
        ("lora", {}, "set it to 0"),
        ("streamlearn-routed", {"num_experts": 1}, "set it to 0 or adapter.num_experts above 1"),
        ("loramoe", {"num_experts": 1}, "set it to 0 or adapter.num_experts above 1"),
    ],
)
def test_a_balance_needs_a_router(preset: str, adapter: dict[str, Any], how: str) -> None:
    """Otherwise every step would fail, and the records would be blamed. With more experts it is accepted."""
    learner = {"balance_strength": 0.25, "localized_balance": 0}  # loramoe's default is 0.1
    message = "learner.balance_strength: must be 0 without a router: one expert per head leaves nothing to choose, "
    message += "found 0.25; "
    with pytest.raises(ConfigError, match=f"^{re.escape(message + how)}$"):
        objective(with_preset(preset, adapter=adapter, learner=learner))
    if preset != "lora":
        assert objective(with_preset(preset, adapter={"num_experts": 4}, learner=learner)).balance_strength == 0.25


def test_a_localized_balance_is_of_tokens() -> None:
    """Not of whole sequences, whose load can be balanced."""
    with pytest.raises(ConfigError, match=r"^learner\.localized_balance: must be 0 where whole sequences are routed"):
        objective(with_preset("mot", learner={"localized_balance": 0.1}))
    assert objective(with_preset("mot", learner={"balance_strength": 0.1})).balance_strength == 0.1


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("adapter.bias", {"adapter": {"bias": "soft"}}),
        ("consolidate.anchor_strength", {"consolidate": {"anchor_strength": 1}}),
    ],
)
def test_experts_of_one_regime_have_no_bias_and_no_anchors(key: str, sections: dict[str, Any]) -> None:
    """Both act on experts that regimes share; with those they are allowed."""
    with pytest.raises(ConfigError, match=f"{re.escape(key)}: acts on experts that regimes share"):
        objective(with_preset("streamlearn", **sections))
    adapter = {**sections.get("adapter", {}), "per_regime": False, "num_experts": 4}
    assert objective(with_preset("streamlearn", **{**sections, "adapter": adapter})).compares


def test_lora_activates_as_many_parameters_as_mh_moe() -> None:
    """The two can be compared at their default ranks."""
    counts = [activated_parameters(resolve(AdapterSettings(preset=p)), SHAPES) for p in ("mh-moe", "lora")]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"preset": "mh-moe", "top_k": 6},
            "adapter.top_k: must be at most num_experts, which is 4, found 6; lower top_k or raise num_experts",
        ),
        ({"preset": "loramoe", "top_k": 7}, "adapter.top_k: must be at most num_experts, which is 6, found 7"),
        (
            {"preset": "lora", "num_experts": 4},
            "adapter.num_experts: must be 1 without a gate to choose among experts, as in preset lora, found 4; "
            "remove num_experts or choose preset mh-moe or loramoe",
        ),
        ({"preset": "lora", "num_heads": 8}, "adapter.num_heads: must be 1 without a gate"),
        ({"preset": "lora", "top_k": 2}, "adapter.top_k: must be at most num_experts, which is 1, found 2"),
        ({"preset": "mot", "per_regime": True}, "adapter.per_regime: must be false where whole sequences are routed"),
        ({"preset": "mot", "num_heads": 4}, "adapter.routes: sequences need a gate and num_heads 1"),
        ({"target_modules": ()}, "adapter.target_modules: must name at least one linear, found none"),
        ({"target_modules": ("",)}, "adapter.target_modules: an empty name matches nothing"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str) -> None:
    """The message names the key, the value and what to change."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(AdapterSettings(**given))


def test_every_option_survives_the_file(tmp_path: Path) -> None:
    """A configuration loaded from adapter_config.json equals the saved one."""
    config = HeadLoraConfig(
        r=3, alpha=1.5, num_heads=2, num_experts=5, top_k=2, gate="softmax", router_gradient="native", init_seed=7
    )
    config.target_modules = ["up_proj"]
    config.save_pretrained(str(tmp_path))
    assert PeftConfig.from_pretrained(str(tmp_path)) == config
