"""The presets: rows of options on the one adapter layer.

| preset  | heads | experts | top-k | gate                      | rank | alpha |
|---------|-------|---------|-------|---------------------------|------|-------|
| mh-moe  | 8     | 4       | 1     | softmax over the selected | 4    | 8     |
| loramoe | 1     | 6       | all   | softmax over all          | 4    | 32    |
| lora    | 1     | 1       | -     | none                      | 20   | 40    |

MH-MoE (arXiv 2602.12587) names no rank; 4 makes a bottleneck of 8 x 4 x 4 = 128. LoRAMoE (arXiv 2312.09979) section 4.1
gives its row. `lora` has the rank at which it activates as many parameters as `mh-moe` on a gated MLP.
"""

from dataclasses import asdict, dataclass

from streamlearn.adapters.config import MLP_LINEARS, Gate, HeadLoraConfig, RouterGradient
from streamlearn.errors import ConfigError
from streamlearn.settings import AdapterSettings


@dataclass(frozen=True)
class Preset:
    """One row; the fields are those of `HeadLoraConfig`."""

    num_heads: int
    num_experts: int
    top_k: int | None
    gate: Gate
    router_gradient: RouterGradient
    r: int
    alpha: float
    target_modules: tuple[str, ...] = MLP_LINEARS


PRESETS = {
    "mh-moe": Preset(8, 4, 1, "softmax_selected", "straight_through", r=4, alpha=8.0),
    "loramoe": Preset(1, 6, None, "softmax", "native", r=4, alpha=32.0),
    "lora": Preset(1, 1, None, "none", "none", r=20, alpha=40.0),
}

OPTIONS = {"rank": "r"} | {name: name for name in ("alpha", "num_heads", "num_experts", "top_k", "target_modules")}
"""Setting -> field of `HeadLoraConfig`."""


def resolve(settings: AdapterSettings) -> HeadLoraConfig:
    """The preset's row with the settings that were given laid over it.

    Raises:
        ConfigError: the result contradicts itself; names the key, what was found and the way out.
    """
    row = asdict(PRESETS[settings.preset])
    given = {option: getattr(settings, name) for name, option in OPTIONS.items() if getattr(settings, name) is not None}
    try:
        return HeadLoraConfig(**{**row, **given})
    except ConfigError as error:
        raise ConfigError(f"adapter.{error}") from error
