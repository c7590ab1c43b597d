"""Checks of an adapter against the shapes of a backbone."""

import re

import pytest

from streamlearn.adapters.presets import (
    HeadLoraConfig,
    activated_parameters,
    check,
    decoder_targets,
    targets,
)
from streamlearn.errors import ConfigError

SHAPES = {"model.layers.0.mlp.gate_proj": (256, 640), "model.layers.0.mlp.up_proj": (256, 640)} | {
    "model.layers.0.mlp.down_proj": (640, 256)
}


def test_an_unknown_target_is_refused_with_the_nearest() -> None:
    """The message lists the linears of the backbone."""
    config = HeadLoraConfig(target_modules=["gate_proj", "up_prj"])
    message = (
        "adapter.target_modules: the backbone has no linear named up_prj; did you mean up_proj? it has down_proj, "
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, SHAPES, {})


def test_heads_that_do_not_divide_are_refused() -> None:
    """The message names the linear, its size and the numbers of heads that fit."""
    message = (
        "adapter.num_heads: must divide every target's input size, but 6 does not divide 256, the input size of "
        "model.layers.0.mlp.gate_proj; use one of 1, 2, 4, 8, 16, 32, 64"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(HeadLoraConfig(num_heads=6), SHAPES, {})


def test_vision_modules_are_outside_the_decoder() -> None:
    """A name that only the decoder has is refused, and so is any name for a text-only backbone."""
    tower = {"model.vision_tower.layers.0.mlp.fc1": (16, 32)}
    check(HeadLoraConfig(vision_modules=["fc1"]), SHAPES, tower)
    with pytest.raises(
        ConfigError, match=r"adapter\.vision_modules: the backbone has no linear named up_proj; it has fc1"
    ):
        check(HeadLoraConfig(vision_modules=["up_proj"]), SHAPES, tower)
    with pytest.raises(ConfigError, match=r"adapter\.vision_modules: the backbone has no vision tower, found fc1"):
        check(HeadLoraConfig(vision_modules=["fc1"]), SHAPES, {})
    with pytest.raises(ConfigError, match="vision_modules: must be empty where whole sequences are routed"):
        HeadLoraConfig(vision_modules=["fc1"], num_heads=1, routes="sequences")


def test_a_target_is_a_whole_name_or_its_last_part() -> None:
    """PEFT's own rule: `proj` is not the end of `gate_proj`."""
    assert set(targets(["up_proj", "model.layers.0.mlp.down_proj"], SHAPES)) == {
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
    }
    assert targets(["proj"], SHAPES) == {}


def test_targets_below_the_first_layer_get_no_adapter() -> None:
    """They are not counted; a first layer above all targets is refused with the last that has one."""
    shapes = {**SHAPES, "model.layers.1.mlp.up_proj": (256, 640), "lm_head.up_proj": (256, 100)}
    config = HeadLoraConfig(first_layer=1, target_modules=["up_proj"])
    check(config, shapes, {})
    assert list(decoder_targets(config, shapes)) == ["model.layers.1.mlp.up_proj", "lm_head.up_proj"]
    above = HeadLoraConfig(first_layer=2, target_modules=["gate_proj"])
    with pytest.raises(ConfigError, match=r"adapter\.first_layer: must be at most 0, .* found 2"):
        check(above, shapes, {})
    with pytest.raises(ConfigError, match="first_layer: must not be negative"):
        HeadLoraConfig(first_layer=-1)


def test_activated_parameters_are_those_of_the_selected_experts() -> None:
    """Rank times (in + heads times out) for each selected expert and target."""
    config = HeadLoraConfig(r=3, num_heads=2, num_experts=5, top_k=2, target_modules=["up_proj", "down_proj"])
    assert activated_parameters(config, SHAPES) == 2 * 3 * ((256 + 2 * 640) + (640 + 2 * 256))
