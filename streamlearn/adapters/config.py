"""The adapter's PEFT configuration, and its entry in PEFT's list of methods.

PEFT keeps its method names in a closed enum. Importing this module adds `HEAD_LORA` to it, so that
`PeftModel.from_pretrained` loads a folder written by `save_pretrained`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from aenum import extend_enum
from peft import PeftConfig, PeftType

from streamlearn.errors import ConfigError

METHOD = "HEAD_LORA"
if METHOD not in PeftType.__members__:  # a second import must not add it again
    extend_enum(PeftType, METHOD, METHOD)

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""The MLP linears of Qwen3, Llama, Mistral and Gemma."""

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
    target_modules: list[str] | str = field(default_factory=lambda: list(MLP_LINEARS))
    """Decoder linears that get an adapter, by the last part of their names. PEFT also takes a regular expression of
    whole names, or "all-linear"; the daemon takes names."""
    vision_modules: list[str] = field(default_factory=list)
    """The same for the linears of the vision tower and projector."""
    first_layer: int = 0
    """First decoder layer with an adapter, counted from 0; the gradient is not propagated below it."""
    exclude_modules: str | None = None
    """Pattern of the names to leave out although they match a target; set by `attach`."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """PEFT's: pattern of names -> rank of their experts, in place of `r`."""
    layers_to_transform: list[int] | int | None = None
    """PEFT's: numbers of the layers that get an adapter; None: all."""
    layers_pattern: list[str] | str | None = None
    """PEFT's: what precedes the number of a layer in names, where that is not the first number."""
    modules_to_save: list[str] | None = None
    """PEFT's: modules that are trained and saved as a whole, such as the head of a classifier."""
    per_regime: bool = False
    """Whether this is the adapter of one regime, named by `regime_adapter`; if not, all regimes share it."""
    regimes: int = 0
    """Regime slots, each with its own CP bias in every layer; 0: routing does not depend on the regime."""
    init_seed: int = 0
    """Seed of A and of the router; B is initialized to zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType[METHOD]
        self.target_modules = self._named_modules()
        self._check_literals()
        self._check_sizes()
        self._check_names()
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

    def _named_modules(self) -> list[str] | str:
        """`target_modules` without repetitions."""
        names: Any = self.target_modules
        if isinstance(names, str) and names:
            return names
        if not isinstance(names, list | tuple | set | frozenset) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                "target_modules: must be names of linears, a regular expression of them, or all-linear, found "
                f"{names!r}; remove the key to adapt the MLP linears"
            )
        return list(dict.fromkeys(names))

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
