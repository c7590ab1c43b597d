"""The adapter's PEFT configuration, the objective, and the presets, which are named sets of both.

PEFT keeps its method names in a closed enum. Importing this module adds `HEAD_LORA` to it, so that
`PeftModel.from_pretrained` loads a folder written by `save_pretrained`.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from aenum import extend_enum
from peft import PeftConfig, PeftType
from torch import nn

from streamlearn.errors import ConfigError
from streamlearn.settings import Accumulation, AdapterSettings, Bias, Importance, PresetName, Settings

METHOD = "HEAD_LORA"
if METHOD not in PeftType.__members__:  # a second import must not add it again
    extend_enum(PeftType, METHOD, METHOD)

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The linears of Qwen3, Llama, Mistral and Gemma."""

Gate = Literal["softmax_selected", "softmax", "none"]
"""Softmax over the selected experts (MH-MoE eq. 13), softmax over all experts, or no gate."""

RouterGradient = Literal["straight_through", "native", "selected", "none"]
"""How the router learns from the task loss.

A softmax over one selected expert is the constant 1 and has no gradient.

- `straight_through`: the gate is that constant, its gradient the one of the expert's probability among all experts.
- `native`: the expert's probability among all experts is the gate.
- `selected`: the gradient of the softmax over the selected experts, for two or more of them.
- `none`: the router keeps its random initialization.
"""

Routes = Literal["tokens", "sequences"]
"""Unit of routing: every head slice of every token, by the layer's own router (MH-MoE); or whole sequences, by one
router per transformer block that all adapted linears of the block share (MoT)."""


_REGIME = "regime"


def regime_adapter(slot: int) -> str:
    """PEFT's name for the adapter of the regime in a slot."""
    return f"{_REGIME}{slot}"


def slot_of(adapter: str) -> int:
    """The inverse of `regime_adapter`."""
    return int(adapter.removeprefix(_REGIME))


@dataclass
class HeadLoraConfig(PeftConfig):  # type: ignore[misc]  # peft is not type-checked here
    """Options of a layer of LoRA experts per head slice; a preset is one set of values."""

    r: int = 4
    """Rank of each expert."""
    alpha: float = 8.0
    """The experts' output is scaled by alpha / r."""
    num_heads: int = 8
    """Slices of a token's vector, each with its own router and experts; must divide every target's input size."""
    num_experts: int = 4
    """Experts per head."""
    top_k: int | None = 1
    """Experts selected per head and token; None selects all of them."""
    gate: Gate = "softmax_selected"
    """Weights of the selected experts."""
    router_gradient: RouterGradient = "straight_through"
    """How the router learns from the task loss."""
    routes: Routes = "tokens"
    """Unit of routing."""
    noise: float = 0.0
    """In training, sequence routing adds a uniform draw from [0, noise] to each logit before selection (MoT eq. 1)."""
    target_modules: list[str] = field(default_factory=lambda: list(MLP_LINEARS))
    """Decoder linears that get an adapter, by their names or the last part of them."""
    vision_modules: list[str] = field(default_factory=list)
    """The same for the linears of the vision tower and projector."""
    first_layer: int = 0
    """First decoder layer with an adapter, counted from 0; the gradient is not propagated below it."""
    exclude_modules: str | None = None
    """Regular expression of names to leave out although they match a target; set by `attach`."""
    dropout: float = 0.0
    """Share of the experts' inputs that a training pass drops."""
    per_regime: bool = False
    """Whether this is the adapter of one regime, named by `regime_adapter`; if not, all regimes share it."""
    regimes: int = 0
    """Regime slots, each with its own CP bias in every layer; 0: routing does not depend on the regime."""
    init_seed: int = 0
    """Seed of A and of the router; B is initialized to zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType[METHOD]
        self._check_literals()
        self._check_sizes()
        self._check_names()
        self.target_modules = list(dict.fromkeys(self.target_modules))
        self._check_routing()

    @property
    def selected(self) -> int:
        """Number of experts selected per head and token."""
        return self.num_experts if self.top_k is None else self.top_k

    @property
    def scaling(self) -> float:
        """Factor on the experts' output: alpha / r."""
        return self.alpha / self.r

    @property
    def routed(self) -> bool:
        """Whether there is a router; a softmax over one expert is the constant 1 and needs none."""
        return self.gate != "none" and self.num_experts > 1

    def _check_literals(self) -> None:
        literals = {"gate": Gate, "router_gradient": RouterGradient, "routes": Routes}
        for name, literal in literals.items():
            if getattr(self, name) not in get_args(literal):
                allowed = ", ".join(get_args(literal))
                raise ConfigError(f"{name}: must be one of {allowed}, found {getattr(self, name)!r}")

    def _check_sizes(self) -> None:
        for name in ("r", "alpha", "num_heads", "num_experts", "top_k"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}: must be positive, found {value}")
        if self.first_layer < 0:
            raise ConfigError(f"first_layer: must not be negative, found {self.first_layer}")
        if self.selected > self.num_experts:
            raise ConfigError(
                f"top_k: must be at most num_experts, which is {self.num_experts}, found {self.top_k}; "
                "lower top_k or raise num_experts"
            )

    def _check_names(self) -> None:
        if isinstance(self.target_modules, str):
            raise ConfigError(f"target_modules: must be a list of names, found {self.target_modules!r}")
        if not all(self.target_modules):
            raise ConfigError(f"target_modules: an empty name matches nothing, found {self.target_modules}")
        if not self.target_modules:
            raise ConfigError(
                "target_modules: must name at least one linear, found none; remove the key to adapt the MLP linears"
            )

    def _check_routing(self) -> None:
        if self.vision_modules and self.routes == "sequences":
            raise ConfigError(
                "vision_modules: must be empty where whole sequences are routed, by their text only, found "
                f"{', '.join(self.vision_modules)}; remove the key"
            )
        if self.noise < 0 or (self.noise and self.routes == "tokens"):
            raise ConfigError(f"noise: must be 0 when tokens are routed, and never negative, found {self.noise}")
        if self.routes == "sequences" and (self.num_heads > 1 or self.gate == "none"):
            raise ConfigError("routes: sequences need a gate and num_heads 1: a sequence is not split into head slices")
        if self.per_regime and (self.routes == "sequences" or self.regimes):
            where = "where whole sequences are routed" if self.routes == "sequences" else "with a CP bias"
            raise ConfigError(
                f"per_regime: must be false {where}, which needs experts that regimes share; remove the key"
            )
        if self.gate == "none" and (self.num_experts > 1 or self.num_heads > 1):
            name = "num_experts" if self.num_experts > 1 else "num_heads"
            raise ConfigError(
                f"{name}: must be 1 without a gate to choose among experts, as in preset lora, found "
                f"{getattr(self, name)}; remove {name} or choose preset mh-moe or loramoe"
            )


@dataclass(frozen=True)
class Objective:
    """Terms added to the task loss, and the bias of the routers (CP-MoE eq. 10 and 15)."""

    bias: Bias = "none"
    """How a new regime biases routing: not at all, or in proportion to CKA (soft)."""
    bias_strength: float = 0.0
    """alpha of eq. 10."""
    anchor_strength: float = 0.0
    """lambda of eq. 15."""
    importance: Importance = "path"
    """Where importance is measured, where anchors hold it."""
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
        """Whether what is known steers a new regime, by a CP bias or by anchors."""
        return self.bias != "none" or self.anchor_strength > 0

    @property
    def is_plain(self) -> bool:
        """Whether the task loss is all there is; if not, the learner gets the hooks of `baselines`."""
        return not (self.compares or self.balance_strength or self.localized_balance or self.staged)


@dataclass(frozen=True)
class Preset:
    """A named set of defaults."""

    options: dict[str, Any]
    """Fields of `HeadLoraConfig` that differ from its defaults."""
    objective: Objective = Objective()


ALL_LINEARS = [*ATTENTION_LINEARS, *MLP_LINEARS]
CONSISTENT = Objective(
    bias="soft",
    bias_strength=0.2,
    anchor_strength=10.0,
    importance="transient",
    accumulation="sum",
    balance_strength=0.1,
)
"""CP-MoE's terms: routing bias, consolidation by a transient expert, load balance."""
PRESETS: dict[PresetName, Preset] = {
    # Each regime has its own adapter.
    "streamlearn": Preset({"num_experts": 1, "per_regime": True}, Objective(router_lr=0.1)),
    # The same; a router of the regime chooses between two experts for each head slice of each token.
    "streamlearn-routed": Preset({"num_experts": 2, "per_regime": True}, Objective(router_lr=0.1)),
    # MH-MoE (arXiv 2602.12587) states no rank; 4 gives a bottleneck of 8 x 4 x 4 = 128.
    "mh-moe": Preset({}),
    # CP-MoE (arXiv 2605.20247), section 4, states no LoRA alpha, and its lambda of 5e3 belongs to a scale of importance
    # that it does not fix.
    "cp-moe": Preset(
        {
            "num_heads": 1,
            "num_experts": 8,
            "top_k": 2,
            "router_gradient": "selected",
            "target_modules": ALL_LINEARS,
            "dropout": 0.1,
        },
        CONSISTENT,
    ),
    # The heads of `mh-moe` with everything that `cp-moe` does at a shift.
    "mh-cp-moe": Preset({}, CONSISTENT),
    # LoRAMoE (arXiv 2312.09979), section 4.1.
    "loramoe": Preset(
        {
            "num_heads": 1,
            "num_experts": 6,
            "top_k": None,
            "gate": "softmax",
            "router_gradient": "native",
            "alpha": 32.0,
            "dropout": 0.05,
        },
        Objective(localized_balance=0.1),
    ),
    # MoT needs Omega(N log N) experts for N classes.
    "mot": Preset(
        {"num_heads": 1, "num_experts": 8, "target_modules": ALL_LINEARS, "routes": "sequences", "noise": 0.1},
        Objective(staged=True),
    ),
    # At this rank it activates as many parameters as `mh-moe` on a gated MLP.
    "lora": Preset(
        {
            "num_heads": 1,
            "num_experts": 1,
            "top_k": None,
            "gate": "none",
            "router_gradient": "none",
            "r": 20,
            "alpha": 40.0,
        }
    ),
}
assert tuple(PRESETS) == get_args(PresetName), "the settings name the presets of this table, in its order"


def resolve(settings: AdapterSettings, *, regimes: int = 0) -> HeadLoraConfig:
    """Combine the preset's options with the settings that override them.

    Args:
        settings: The `adapter` section.
        regimes: Regime slots, each with its own CP bias in every layer.

    Raises:
        ConfigError: the result contradicts itself; the message names the key, the value and what to change.
    """
    shared = {option.name for option in fields(HeadLoraConfig)} & AdapterSettings.model_fields.keys()
    given = {"r": settings.rank} | {name: getattr(settings, name) for name in shared}
    overrides = {name: value for name, value in given.items() if value is not None}
    try:
        return HeadLoraConfig(**{**PRESETS[settings.preset].options, **overrides, "regimes": regimes})
    except ConfigError as error:
        raise ConfigError(f"adapter.{error}") from error


def objective(settings: Settings) -> Objective:
    """Combine the preset's objective with the settings that override it.

    Raises:
        ConfigError: a bias or a balance without a router, a localized balance of whole sequences, a bias or anchors for
            experts that no two regimes share, or a mean of adapters where regimes have none of their own.
    """
    defaults = PRESETS[settings.adapter.preset].objective
    given: dict[str, Any] = {}
    for section in (settings.adapter, settings.learner, settings.consolidate):
        for option in fields(Objective):
            value = getattr(section, option.name, None)
            if value is not None:
                given[option.name] = value
    if settings.adapter.bias == "soft" and defaults.bias == "none" and settings.adapter.bias_strength is None:
        given["bias_strength"] = CONSISTENT.bias_strength
    config = resolve(settings.adapter)
    combined = Objective(**{**asdict(defaults), **given})
    if combined.bias != "none" and config.gate == "none":
        raise ConfigError(f"adapter.bias: preset {settings.adapter.preset} has no router to bias; remove the key")
    _check_balance(combined, config)
    if settings.serve.unknown == "mean" and not config.per_regime:
        raise ConfigError(
            "serve.unknown: mean averages the adapters of regimes, and here all regimes share one; set it to auto, "
            "nearest or backbone"
        )
    if combined.compares and config.per_regime:
        key = "adapter.bias" if combined.bias != "none" else "consolidate.anchor_strength"
        raise ConfigError(
            f"{key}: acts on experts that regimes share, and here each regime has its own; remove the key, or set "
            "adapter.per_regime: false"
        )
    return combined


def _check_balance(combined: Objective, config: HeadLoraConfig) -> None:
    """Refuse a term of the objective that has nothing to balance."""
    for name in ("balance_strength", "localized_balance"):
        strength = getattr(combined, name)
        if strength and not config.routed:
            how = "" if config.gate == "none" else " or adapter.num_experts above 1"
            raise ConfigError(
                f"learner.{name}: must be 0 without a router: one expert per head leaves nothing to choose, found "
                f"{strength}; set it to 0{how}"
            )
    if combined.localized_balance and config.routes == "sequences":
        raise ConfigError(
            "learner.localized_balance: must be 0 where whole sequences are routed: it balances a record's tokens, "
            f"found {combined.localized_balance}; remove the key"
        )


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
