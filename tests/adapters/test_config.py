"""The PEFT configuration: contradictions, derived values, its file."""

import re
from pathlib import Path
from typing import Any

import pytest
from peft import PeftConfig

from streamlearn.adapters import HeadLoraConfig
from streamlearn.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gate": "sigmoid"}, "gate: must be one of softmax_selected, softmax, none"), ({"r": 0}, "r: must be positive")],
)
def test_values_are_checked_on_construction(options: dict[str, Any], message: str) -> None:
    """A hand-edited adapter_config.json is checked too."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        HeadLoraConfig(**options)


def test_every_option_survives_the_file(tmp_path: Path) -> None:
    """A configuration loaded from adapter_config.json equals the saved one."""
    config = HeadLoraConfig(
        r=3, alpha=1.5, num_heads=2, num_experts=5, top_k=2, gate="softmax", router_gradient="native", init_seed=7
    )
    config.target_modules = ["up_proj"]
    config.save_pretrained(str(tmp_path))
    assert PeftConfig.from_pretrained(str(tmp_path)) == config


def test_sizes_and_scaling_follow_from_the_options() -> None:
    """`top_k` None selects every expert; only a gate needs a router; a name that is given twice counts once."""
    config = HeadLoraConfig(r=4, alpha=6.0, num_experts=3, top_k=None, target_modules=["up_proj", "up_proj"])
    assert (config.selected, config.scaling, config.routed) == (3, 1.5, True)
    assert config.target_modules == ["up_proj"]
    assert not HeadLoraConfig(num_heads=1, num_experts=1, top_k=None, gate="none", router_gradient="none").routed
