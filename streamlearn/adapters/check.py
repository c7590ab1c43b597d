"""Checks that an adapter fits a backbone; they need no weights."""

import difflib
import math
from collections.abc import Mapping, Sequence

from torch import nn

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.errors import ConfigError

LinearShapes = Mapping[str, tuple[int, int]]
"""Name of a linear in the backbone -> (in features, out features)."""


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Collect the shapes of every `nn.Linear` in `model`, which may be on the meta device."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: (linear.in_features, linear.out_features) for name, linear in linears}


def targets(names: Sequence[str], shapes: LinearShapes) -> dict[str, tuple[int, int]]:
    """Select the linears that get an adapter: PEFT's rule, the name equals a target or ends with a dot and a target."""
    return {name: shape for name, shape in shapes.items() if any(_matches(name, target) for target in names)}


def decoder_targets(config: HeadLoraConfig, shapes: LinearShapes) -> dict[str, tuple[int, int]]:
    """Select the linears of the decoder that get an adapter: the targets in `first_layer` and above."""
    selected = targets(config.target_modules, shapes)
    return {
        name: shape for name, shape in selected.items() if _layer_of(name, config.first_layer) >= config.first_layer
    }


def check(config: HeadLoraConfig, shapes: LinearShapes, vision_shapes: LinearShapes) -> None:
    """Check that the adapter fits the backbone.

    Args:
        config: The adapter.
        shapes: Linears of the decoder.
        vision_shapes: Linears of the vision tower and projector; empty for a text-only backbone.

    Raises:
        ConfigError: a target matches no linear of the backbone, no target is in `first_layer` or above, or `num_heads`
            does not divide the input size of one.
    """
    if config.vision_modules and not vision_shapes:
        raise ConfigError(
            f"adapter.vision_modules: the backbone has no vision tower, found {', '.join(config.vision_modules)}; "
            "remove the key"
        )
    _check_names("target_modules", config.target_modules, shapes)
    _check_names("vision_modules", config.vision_modules, vision_shapes)
    adapted = decoder_targets(config, shapes)
    if not adapted:
        last = max(_layer_of(name, 0) for name in targets(config.target_modules, shapes))
        raise ConfigError(
            f"adapter.first_layer: must be at most {last}, the last layer with a target, found {config.first_layer}"
        )
    check_heads(config.num_heads, adapted | targets(config.vision_modules, vision_shapes))


def activated_parameters(config: HeadLoraConfig, shapes: LinearShapes) -> int:
    """Count the weights of A and B that each decoder token passes through; comparisons hold this number equal."""
    per_head = config.selected * config.r
    return sum(per_head * (i + config.num_heads * o) for i, o in decoder_targets(config, shapes).values())


def adapter_bytes(config: HeadLoraConfig, shapes: LinearShapes) -> int:
    """Bytes of A and B and of the optimizer's two moments, all in float32; routers are small in comparison."""
    return activated_parameters(config, shapes) * config.num_experts // config.selected * 3 * 4


def _check_names(key: str, names: Sequence[str], shapes: LinearShapes) -> None:
    for target in names:
        if not targets([target], shapes):
            raise ConfigError(f"adapter.{key}: the backbone has no linear named {target}; {_known(target, shapes)}")


def check_heads(num_heads: int, adapted: LinearShapes) -> None:
    """Check that `num_heads` divides the input size of linears. Raises ConfigError."""
    for name, (in_features, _) in adapted.items():
        if in_features % num_heads:
            common = math.gcd(*(width for width, _ in adapted.values()))
            divisors = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise ConfigError(
                f"adapter.num_heads: must divide every target's input size, but {num_heads} does not divide "
                f"{in_features}, the input size of {name}; use one of {', '.join(divisors)}"
            )


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _layer_of(name: str, default: int) -> int:
    """Number of the decoder layer that a linear is part of; `default` for one outside of all layers."""
    return next((int(part) for part in name.split(".") if part.isdigit()), default)


def _known(target: str, shapes: LinearShapes) -> str:
    names = sorted({name.rpartition(".")[2] for name in shapes})
    near = difflib.get_close_matches(target, names, n=1, cutoff=0.6)
    listed = f"it has {', '.join(names) or 'none'}"
    return f"did you mean {near[0]}? {listed}" if near else listed
