"""Whether an adapter fits a backbone, asked before any weight is loaded."""

import difflib
import math
from collections.abc import Mapping, Sequence

from torch import nn

from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.errors import ConfigError

LinearShapes = Mapping[str, tuple[int, int]]
"""Name of a linear in the backbone -> (in features, out features)."""


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Every `nn.Linear` of `model`, which may live on the meta device."""
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: (linear.in_features, linear.out_features) for name, linear in linears}


def targets(names: Sequence[str], shapes: LinearShapes) -> dict[str, tuple[int, int]]:
    """The linears that get an adapter: their name is a target or ends with a dot and a target, PEFT's own rule."""
    return {name: shape for name, shape in shapes.items() if any(_matches(name, target) for target in names)}


def check(config: HeadLoraConfig, shapes: LinearShapes, vision_shapes: LinearShapes) -> None:
    """Refuse an adapter that does not fit; the linears of the decoder, and those of what sees for it.

    Raises:
        ConfigError: a target names no linear of the backbone, or the heads do not divide a target's input size.
    """
    if config.vision_modules and not vision_shapes:
        raise ConfigError(
            f"adapter.vision_modules: the backbone has no vision tower, found {', '.join(config.vision_modules)}; "
            "remove the key"
        )
    wanted = (
        ("target_modules", config.target_modules, shapes),
        ("vision_modules", config.vision_modules, vision_shapes),
    )
    for key, names, there in wanted:
        for target in names:
            if not targets([target], there):
                raise ConfigError(f"adapter.{key}: the backbone has no linear named {target}; {_known(target, there)}")
    chosen = targets(config.target_modules, shapes) | targets(config.vision_modules, vision_shapes)
    for name, (in_features, _) in chosen.items():
        if in_features % config.num_heads:
            common = math.gcd(*(width for width, _ in chosen.values()))
            divisors = [str(n) for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise ConfigError(
                f"adapter.num_heads: must divide every target's input size, but {config.num_heads} does not divide "
                f"{in_features}, the input size of {name}; use one of {', '.join(divisors)}"
            )


def activated_parameters(config: HeadLoraConfig, shapes: LinearShapes) -> int:
    """Weights of A and B that a token of the decoder passes through: what comparisons hold equal."""
    per_head = config.selected * config.r
    return sum(per_head * (i + config.num_heads * o) for i, o in targets(config.target_modules, shapes).values())


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _known(target: str, shapes: LinearShapes) -> str:
    names = sorted({name.rpartition(".")[2] for name in shapes})
    near = difflib.get_close_matches(target, names, n=1, cutoff=0.6)
    listed = f"it has {', '.join(names) or 'none'}"
    return f"did you mean {near[0]}? {listed}" if near else listed
