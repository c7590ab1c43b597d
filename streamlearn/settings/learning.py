"""The frozen model, its experts, and how they learn, notice and remember."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from streamlearn.settings.section import Section


class BackboneSettings(Section):
    """The frozen model."""

    model: str = "builtin:nano"
    """builtin:nano, a local folder (./, ../, / or ~ in front; relative to the configuration file), or a hub id."""
    revision: str | None = None
    """Commit of a hub id, 40 hex digits; required for a hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of a step; auto asks the machine which is faster."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU when there is one."""


Bias = Literal["none", "soft", "claims"]


class AdapterSettings(Section):
    """The trainable experts: a preset, and what to change of it."""

    preset: Literal["streamlearn", "mh-moe", "cp-moe", "loramoe", "mot", "lora"] = "streamlearn"
    """A row of options on the one adapter layer and its objective."""
    rank: PositiveInt | None = None
    """Rank of an expert."""
    alpha: PositiveFloat | None = None
    """LoRA alpha; the update is scaled by alpha / rank."""
    num_heads: PositiveInt | None = None
    """Slices of a token's vector that are routed on their own; must divide every target's input size."""
    num_experts: PositiveInt | None = None
    """Experts in each head's bank."""
    top_k: PositiveInt | None = None
    """Experts selected per head and token."""
    router_gradient: Literal["straight_through", "native", "selected", "none"] | None = None
    """How a router learns from the task loss; none leaves it at its random start."""
    target_modules: tuple[str, ...] | None = None
    """Names of the linears that get an adapter, for example gate_proj, up_proj, down_proj."""
    vision_modules: tuple[str, ...] | None = None
    """Names of linears of the vision tower or projector that get one too, for example linear_1; none unless given."""
    bias: Bias | None = None
    """How a new regime steers routing: none, soft (CKA times bias_strength), claims (experts of its own)."""
    bias_strength: NonNegativeFloat | None = None
    """alpha of CP-MoE eq. 10, for the soft bias."""
    experts_claimed: PositiveInt = 1
    """Experts per head that a regime claims; with more than one, tokens choose among them."""


class LearnerSettings(Section):
    """The optimizer, its objective and its guards."""

    lr: PositiveFloat = 1e-4
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decays (MH-MoE A.3.4)."""
    eps: PositiveFloat = 1e-6
    """AdamW's epsilon (MH-MoE A.3.4)."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay (MH-MoE A.3.4)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from zero."""
    router_lr: NonNegativeFloat | None = None
    """Learning rate of the routers, as a part of lr: 1 as fast as the experts, 0 frozen."""
    balance_strength: NonNegativeFloat | None = None
    """gamma of CP-MoE eq. 15: how strongly tokens are spread over a bank's experts."""
    localized_balance: NonNegativeFloat | None = None
    """beta of LoRAMoE eq. 9: how strongly sample types are kept to their experts."""
    sample_types: tuple[str, str] = ("downstream", "world_knowledge")
    """Values of the record field sample_type: the first half of a bank's experts is for the first, the rest for the
    second (LoRAMoE)."""
    ffn_steps: PositiveInt = 50
    """Length of MoT's stage I, in steps: MLP experts alone, normalised gradients."""
    attention_steps: PositiveInt = 50
    """Length of MoT's stage II, in steps: attention experts alone; stage III, MLP experts again, has no end."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    max_bad_batches: PositiveInt = 3
    """So many batches with a non-finite loss or gradient in a row roll back to the last snapshot."""


class ProbeSettings(Section):
    """The transient expert that looks at a new regime before anything is learned from it."""

    enabled: bool = True
    """Whether new regimes are probed; without it experts are claimed by use alone."""
    warmup_tokens: PositiveInt | None = None
    """Tokens of the new regime that it is trained on; unless given 10,000 of text, 100,000 of image-text (CP-MoE)."""
    lr: PositiveFloat = 1e-2
    """Its learning rate; it has few steps and is thrown away."""
    similarity_tokens: PositiveInt = 1024
    """Tokens on which CKA is taken."""


class ConsolidateSettings(Section):
    """What protects old knowledge."""

    anchor_strength: NonNegativeFloat | None = None
    """lambda of CP-MoE eq. 15: how strongly important weights are held; 0 holds nothing."""
    importance: Literal["path", "transient"] = "path"
    """Where importance is measured: along the training of the experts themselves, or along the transient expert's."""
    coordinates: Literal["bank", "random", "invariant"] = "bank"
    """How a transient expert's importance is carried over: it starts from the bank's A, from an A of its own (CP-MoE as
    written), or is summed over the rank so that no rotation of it matters."""
    damping: PositiveFloat = 1e-3
    """xi of CP-MoE eq. 7."""


class ShiftSettings(Section):
    """When a new regime is declared, and how many are remembered."""

    enabled: bool = True
    """Whether shifts are looked for; without it the whole stream is one regime."""
    false_alarms_per_million: PositiveFloat = 1.0
    """Expected false alarms per million records of a stationary stream; thresholds are quantiles for it."""
    lookahead_records: NonNegativeInt = 16
    """Records held back from training, so that a shift is known before its first record is trained on."""
    min_dwell_records: PositiveInt = 64
    """Records before a new regime may be left again."""
    max_regimes: int = Field(default=32, ge=2, le=256)
    """Regimes remembered; each takes about 27 kB of memory and 36 kB of a snapshot."""


class HoldoutSettings(Section):
    """Records of each regime that are never trained on: they tell, all the time, what was forgotten."""

    every_records: NonNegativeInt = 20
    """Every so many records of a regime one is kept out; 0 keeps none."""
    records_per_regime: PositiveInt = 16
    """Records kept for each regime, a uniform sample of those kept out."""
    time_share: float = Field(default=0.01, ge=0.0, le=0.5)
    """Part of the training time that may go to scoring them; idle time is free."""
