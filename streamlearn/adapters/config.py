"""What an adapter is made of, and its name in PEFT's registry.

PEFT keeps its method names in a closed enum, so `HEAD_LORA` is added to it when this module is imported; from then on a
folder saved by `save_pretrained` is loaded by plain `PeftModel.from_pretrained`.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from aenum import extend_enum
from peft import PeftConfig, PeftType

from streamlearn.errors import ConfigError

METHOD = "HEAD_LORA"
if METHOD not in PeftType.__members__:  # importing twice must not extend twice
    extend_enum(PeftType, METHOD, METHOD)

MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")
"""The MLP linears of Qwen3, Llama, Mistral and Gemma."""

Gate = Literal["softmax_selected", "softmax", "none"]
"""Softmax over the selected experts (eq. 13), over all of them, or no gate at all."""

RouterGradient = Literal["straight_through", "native", "selected", "none"]
"""How the router learns from the task loss.

A softmax over one selected expert is the constant 1 and has no gradient. `straight_through` keeps that value and takes
the gradient of the selected expert's probability among all experts; `native` makes that probability the gate itself;
`selected` is the plain gradient of the softmax over the selected, for two or more of them; `none` leaves the router at
its random start.
"""

Routes = Literal["tokens", "sequences"]
"""What is routed: every head slice of every token by its layer's own router (MH-MoE), or whole sequences by one router
a transformer block, which all adapted linears of the block follow (MoT)."""


@dataclass
class HeadLoraConfig(PeftConfig):  # type: ignore[misc]  # peft is not type-checked here
    """One layer of LoRA experts per head slice; the presets are rows of these options."""

    r: int = 4
    """Rank of an expert."""
    alpha: float = 8.0
    """The update is scaled by alpha / r."""
    num_heads: int = 8
    """Slices of a token's vector, each with its own router and bank; must divide every target's input size."""
    num_experts: int = 4
    """Experts in each head's bank."""
    top_k: int | None = 1
    """Experts selected per head and token; None selects all."""
    gate: Gate = "softmax_selected"
    """How much each selected expert counts."""
    router_gradient: RouterGradient = "straight_through"
    """How the router learns from the task loss."""
    routes: Routes = "tokens"
    """What is routed."""
    noise: float = 0.0
    """Sequence routing in training adds a uniform draw from [0, noise] to each logit before it selects (MoT eq. 1)."""
    target_modules: list[str] = field(default_factory=lambda: list(MLP_LINEARS))
    """Last parts of the names of the linears that get an adapter."""
    vision_modules: list[str] = field(default_factory=list)
    """The same for the linears outside of the decoder, in a model that sees: vision tower and projector."""
    exclude_modules: str | None = None
    """Pattern of names that get none, whatever they end with; `attach` writes it."""
    regimes: int = 0
    """CP biases a layer holds, one for each regime slot; 0: routing knows no regimes."""
    init_seed: int = 0
    """Seed of A and of the routers; B starts at zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType[METHOD]
        self.target_modules = list(dict.fromkeys(self.target_modules))
        self._refuse_contradictions()

    @property
    def selected(self) -> int:
        """Experts selected per head and token, as a number."""
        return self.num_experts if self.top_k is None else self.top_k

    @property
    def scaling(self) -> float:
        """What the experts' output is multiplied by: alpha / r."""
        return self.alpha / self.r

    @property
    def routed(self) -> bool:
        """Whether there is a router at all."""
        return self.gate != "none"

    def _refuse_contradictions(self) -> None:
        literals = {"gate": Gate, "router_gradient": RouterGradient, "routes": Routes}
        for name, known in ((name, get_args(literal)) for name, literal in literals.items()):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}: must be one of {', '.join(known)}, found {getattr(self, name)!r}")
        for name in ("r", "alpha", "num_heads", "num_experts", "top_k"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}: must be positive, found {value}")
        if self.selected > self.num_experts:
            raise ConfigError(
                f"top_k: must be at most num_experts, which is {self.num_experts}, found {self.top_k}; "
                "lower top_k or raise num_experts"
            )
        if not all(self.target_modules):
            raise ConfigError(f"target_modules: an empty name matches nothing, found {self.target_modules}")
        if not self.target_modules:
            raise ConfigError("target_modules: must name at least one linear, found none; remove the key for the MLP's")
        self._refuse_misrouted()

    def _refuse_misrouted(self) -> None:
        if self.vision_modules and self.routes == "sequences":
            raise ConfigError("vision_modules: a sequence is routed by its words, which the vision tower never sees")
        if self.noise < 0 or (self.noise and self.routes == "tokens"):
            raise ConfigError(f"noise: must be 0 unless routes is sequences, and never negative, found {self.noise}")
        if self.routes == "sequences" and (self.num_heads > 1 or not self.routed):
            raise ConfigError("routes: sequences need a gate and num_heads 1, since a sequence has no slices")
        if not self.routed and (self.num_experts > 1 or self.num_heads > 1):
            name = "num_experts" if self.num_experts > 1 else "num_heads"
            raise ConfigError(
                f"{name}: must be 1 where no gate chooses among experts, as in preset lora, found "
                f"{getattr(self, name)}; remove {name} or choose preset mh-moe or loramoe"
            )
