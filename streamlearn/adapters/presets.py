"""The presets: options of the one adapter layer, and its objective.

| preset      | heads | experts | top-k | gate                      | routes    | rank | alpha | targets         |
|-------------|-------|---------|-------|---------------------------|-----------|------|-------|-----------------|
| streamlearn | 8     | 1       | 1     | -                         | -         | 4    | 8     | MLP             |
| mh-moe      | 8     | 4       | 1     | softmax over the selected | tokens    | 4    | 8     | MLP             |
| cp-moe      | 1     | 8       | 2     | softmax over the selected | tokens    | 4    | 8     | attention + MLP |
| loramoe     | 1     | 6       | all   | softmax over all          | tokens    | 4    | 32    | MLP             |
| mot         | 1     | 8       | 1     | softmax over the selected | sequences | 4    | 8     | attention + MLP |
| lora        | 1     | 1       | -     | none                      | -         | 20   | 40    | MLP             |

| preset      | experts belong to | CP bias | alpha | lambda | gamma | beta | router           | stages |
|-------------|-------------------|---------|-------|--------|-------|------|------------------|--------|
| streamlearn | one regime        | none    | -     | 0      | 0     | 0    | -                | no     |
| mh-moe      | all regimes       | none    | -     | 0      | 0     | 0    | straight-through | no     |
| cp-moe      | all regimes       | soft    | 0.2   | 10     | 0.1   | 0    | selected         | no     |
| loramoe     | all regimes       | none    | -     | 0      | 0     | 0.1  | native           | no     |
| mot         | all regimes       | none    | -     | 0      | 0     | 0    | straight-through | yes    |

- `streamlearn`: each regime has an adapter of its own; with more than one expert a head, tokens choose among them.
- MH-MoE (arXiv 2602.12587) states no rank; 4 gives a bottleneck of 8 x 4 x 4 = 128.
- CP-MoE: arXiv 2605.20247, section 4. It states no LoRA alpha. Its lambda of 5e3 refers to a scale of importance that
  it does not fix; on our scale nothing is learned after the first shift at that value (four SuperNI tasks, one seed:
  lambda 1, 10 and 100 give AP .374, .380, .371 and AF .014, .003, .010).
  Its importance is summed over steps and regimes as published (`accumulation` sum), since it is a baseline; where
  another preset is given anchors, importance is bounded per regime.
- LoRAMoE: arXiv 2312.09979, section 4.1.
- MoT requires Omega(N log N) experts for N classes.
- `lora` has the rank at which it activates as many parameters as `mh-moe` on a gated MLP.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

from streamlearn.adapters.config import MLP_LINEARS, Gate, HeadLoraConfig, RouterGradient, Routes
from streamlearn.errors import ConfigError
from streamlearn.settings import Accumulation, AdapterSettings, Bias, Settings

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEARS = (*ATTENTION_LINEARS, *MLP_LINEARS)


@dataclass(frozen=True)
class Shape:
    """A row of the first table; the fields are those of `HeadLoraConfig`."""

    num_heads: int
    num_experts: int
    top_k: int | None
    gate: Gate
    router_gradient: RouterGradient
    r: int
    alpha: float
    target_modules: tuple[str, ...] = MLP_LINEARS
    routes: Routes = "tokens"
    noise: float = 0.0
    per_regime: bool = False


@dataclass(frozen=True)
class Objective:
    """A row of the second table: terms added to the task loss, and how routers are biased (CP-MoE eq. 10, 15)."""

    bias: Bias = "none"
    """How a new regime biases routing: not at all, or in proportion to CKA (soft)."""
    bias_strength: float = 0.0
    """alpha of eq. 10."""
    anchor_strength: float = 0.0
    """lambda of eq. 15."""
    accumulation: Accumulation = "per_regime"
    """How the importance of several regimes adds up, where anchors hold it."""
    balance_strength: float = 0.0
    """gamma of eq. 15."""
    localized_balance: float = 0.0
    """beta of LoRAMoE eq. 9."""
    router_lr: float = 1.0
    """Learning rate of the routers, as a fraction of that of the experts."""
    staged: bool = False
    """Whether experts are trained in MoT's three stages."""

    @property
    def compares(self) -> bool:
        """Whether a new regime is compared with what is known, for its CP bias or its importance."""
        return self.bias != "none" or self.anchor_strength > 0


SHAPES = {
    "streamlearn": Shape(8, 1, 1, "softmax_selected", "straight_through", r=4, alpha=8.0, per_regime=True),
    "streamlearn-routed": Shape(8, 2, 1, "softmax_selected", "straight_through", r=4, alpha=8.0, per_regime=True),
    "mh-moe": Shape(8, 4, 1, "softmax_selected", "straight_through", r=4, alpha=8.0),
    "cp-moe": Shape(1, 8, 2, "softmax_selected", "selected", r=4, alpha=8.0, target_modules=ALL_LINEARS),
    "loramoe": Shape(1, 6, None, "softmax", "native", r=4, alpha=32.0),
    "mot": Shape(
        1,
        8,
        1,
        "softmax_selected",
        "straight_through",
        r=4,
        alpha=8.0,
        target_modules=ALL_LINEARS,
        routes="sequences",
        noise=0.1,
    ),
    "lora": Shape(1, 1, None, "none", "none", r=20, alpha=40.0),
}

OBJECTIVES = {
    "streamlearn": Objective(router_lr=0.1),
    "streamlearn-routed": Objective(router_lr=0.1),
    "mh-moe": Objective(),
    "cp-moe": Objective(bias="soft", bias_strength=0.2, anchor_strength=10.0, accumulation="sum", balance_strength=0.1),
    "loramoe": Objective(localized_balance=0.1),
    "mot": Objective(staged=True),
    "lora": Objective(),
}

OPTIONS = {"rank": "r"} | {
    name: name
    for name in (
        "alpha",
        "num_heads",
        "num_experts",
        "top_k",
        "router_gradient",
        "target_modules",
        "vision_modules",
        "first_layer",
        "per_regime",
    )
}
"""Setting of the `adapter` section -> field of `HeadLoraConfig`."""


def resolve(settings: AdapterSettings, *, regimes: int = 0) -> HeadLoraConfig:
    """Combine the preset's shape with the settings that override it.

    Args:
        settings: The `adapter` section.
        regimes: Regime slots, each with its own CP bias in every layer.

    Raises:
        ConfigError: the result contradicts itself; the message names the key, the value and what to change.
    """
    defaults = asdict(SHAPES[settings.preset])
    given = {option: getattr(settings, name) for name, option in OPTIONS.items() if getattr(settings, name) is not None}
    try:
        return HeadLoraConfig(**{**defaults, **given, "regimes": regimes})
    except ConfigError as error:
        raise ConfigError(f"adapter.{error}") from error


def objective(settings: Settings) -> Objective:
    """Combine the preset's objective with the settings that override it.

    Raises:
        ConfigError: a bias or a balance without a router, a localized balance of whole sequences, a bias or anchors for
            experts that no two regimes share, or a mean of adapters where regimes have none of their own.
    """
    defaults = OBJECTIVES[settings.adapter.preset]
    given: dict[str, Any] = {}
    for section in (settings.adapter, settings.learner, settings.consolidate):
        for field in fields(Objective):
            value = getattr(section, field.name, None)
            if value is not None:
                given[field.name] = value
    if settings.adapter.bias == "soft" and defaults.bias == "none" and settings.adapter.bias_strength is None:
        given["bias_strength"] = OBJECTIVES["cp-moe"].bias_strength
    if SHAPES[settings.adapter.preset].gate == "none" and given.get("bias", "none") != "none":
        raise ConfigError(f"adapter.bias: preset {settings.adapter.preset} has no router to bias; remove the key")
    wanted = Objective(**{**asdict(defaults), **given})
    config = resolve(settings.adapter)
    _check_balance(wanted, config)
    per_regime = config.per_regime
    if settings.serve.unknown == "mean" and not per_regime:
        raise ConfigError(
            "serve.unknown: mean averages the adapters of regimes, and here all regimes share one; set it to auto, "
            "nearest or backbone"
        )
    if wanted.compares and per_regime:
        key = "adapter.bias" if wanted.bias != "none" else "consolidate.anchor_strength"
        raise ConfigError(
            f"{key}: acts on experts that regimes share, and here each regime has its own; remove the key, or set "
            "adapter.per_regime: false"
        )
    return wanted


def _check_balance(wanted: Objective, config: HeadLoraConfig) -> None:
    """Refuse a term of the objective that has nothing to balance."""
    for name in ("balance_strength", "localized_balance"):
        strength = getattr(wanted, name)
        if strength and not config.routed:
            how = "" if config.gate == "none" else " or adapter.num_experts above 1"
            raise ConfigError(
                f"learner.{name}: must be 0 without a router: one expert per head leaves nothing to choose, found "
                f"{strength}; set it to 0{how}"
            )
    if wanted.localized_balance and config.routes == "sequences":
        raise ConfigError(
            "learner.localized_balance: must be 0 where whole sequences are routed: it balances a record's tokens, "
            f"found {wanted.localized_balance}; remove the key"
        )
