"""Settings of the frozen model, its experts, their training, shift detection and consolidation."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from streamlearn.settings.section import Section

Quantization = Literal["none", "int8", "nf4"]


class BackboneSettings(Section):
    """The frozen model."""

    model: str = "builtin:nano"
    """builtin:nano, builtin:nano-vl, a Hugging Face hub id, or a local folder. A folder starts with ./, ../, / or ~; it
    is relative to the configuration file."""
    revision: str | None = None
    """Commit of the hub model, 40 hex digits; required for a hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of a training step; auto measures which is faster on this machine."""
    quantization: Quantization = "none"
    """How the weights of the decoder's linears are stored: none, in dtype; int8, in 1 byte each; nf4, in 0.63 bytes. A
    step computes in dtype, and experts stay float32. int8 and nf4 need the extra quantization."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto uses a GPU if there is one."""
    shard: bool = False
    """Whether the processes of torchrun share the decoder's layers: each keeps its part, and the weights of a layer are
    gathered when it computes (FSDP2). For a backbone that does not fit on one device."""


PresetName = Literal["streamlearn", "streamlearn-routed", "mh-moe", "cp-moe", "mh-cp-moe", "loramoe", "mot", "lora"]
"""The keys of `streamlearn.adapters.PRESETS`, which checks that none is missing."""
Bias = Literal["none", "soft"]
Accumulation = Literal["sum", "per_regime"]
Importance = Literal["path", "transient"]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdapterSettings(Section):
    """The trainable experts: a preset, and values that replace the preset's."""

    preset: PresetName = "streamlearn"
    """Defaults of the keys below and of the objective."""
    start: str | None = None
    """A LoRA that PEFT saved, from which every regime begins: a hub id, or a local folder, written like backbone.model.
    It is merged into the backbone's weights when they are loaded."""
    start_revision: str | None = None
    """Commit of its hub repository, 40 hex digits; required for a hub id."""
    rank: PositiveInt | None = None
    """Rank of an expert."""
    alpha: PositiveFloat | None = None
    """LoRA alpha; an expert's output is scaled by alpha / rank."""
    num_heads: PositiveInt | None = None
    """Slices of a token's vector, each routed separately; must divide the input size of every target."""
    num_experts: PositiveInt | None = None
    """Experts per head; with more than one, a router chooses among them for each token."""
    top_k: PositiveInt | None = None
    """Experts selected per head and token."""
    router_gradient: Literal["straight_through", "native", "selected", "none"] | None = None
    """How the router gets a gradient from the task loss; none leaves it as initialized."""
    target_modules: tuple[str, ...] | None = None
    """Names of the linear layers that get an adapter, for example gate_proj, up_proj, down_proj."""
    vision_modules: tuple[str, ...] | None = None
    """Names of linear layers of the vision tower or projector that get one too, such as linear_1; none by default."""
    first_layer: PositiveInt | None = None
    """First decoder layer that gets an adapter, counted from 0; the backward pass ends there. By default every layer
    gets one."""
    bias: Bias | None = None
    """How routing depends on the regime where experts are shared: none, or soft (CKA times bias_strength)."""
    bias_strength: NonNegativeFloat | None = None
    """Strength of the soft bias; alpha in CP-MoE eq. 10."""
    dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of an expert's inputs that a training pass drops. By default the preset's."""
    per_regime: bool | None = None
    """Whether each regime gets an adapter of its own; if not, all share one. By default the preset's."""
    max_in_memory: PositiveInt = 32
    """Maximum adapters of regimes in memory, with the optimizer's moments. The least recently used are offloaded to
    files in the state folder, and read back when they are needed. It does not change what is learned."""


class LearnerSettings(Section):
    """The optimizer, its objective and its safeguards."""

    lr: PositiveFloat | None = None
    """Learning rate. By default 0.003 where each regime has its own adapter, which starts untrained and sees each
    record once; 0.0003 for an adapter that all regimes share, which forgets more at higher rates."""
    lr_decay_updates: NonNegativeInt | None = None
    """Updates of an adapter after which its rate falls with the square root of their number, to a tenth at the lowest;
    0: never. By default 20 where each regime has its own adapter, and 0 for an adapter that all regimes share."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's moments (MH-MoE A.3.4)."""
    eps: PositiveFloat = 1e-6
    """AdamW's epsilon (MH-MoE A.3.4)."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay (MH-MoE A.3.4)."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly from zero."""
    router_lr: NonNegativeFloat | None = None
    """Learning rate of the routers as a multiple of lr: 1 as fast as the experts, 0 frozen. By default the preset's."""
    balance_strength: NonNegativeFloat | None = None
    """Weight of the load-balancing loss over a head's experts; gamma in CP-MoE eq. 15. By default the preset's."""
    localized_balance: NonNegativeFloat | None = None
    """Weight of the localized balancing constraint; beta in LoRAMoE eq. 9. By default the preset's."""
    localized_delta: float = Field(default=0.1, ge=-1.0, le=1.0)
    """Imbalance between experts of a record's own type and the others; delta in LoRAMoE eq. 7. As published, a positive
    one sends a record to the other type's experts, and a negative one to those of its own."""
    localized_tau: PositiveFloat = 1.0
    """Temperature of the gates that the localized balance counts; tau in LoRAMoE eq. 6."""
    sample_types: tuple[str, str] = ("downstream", "world_knowledge")
    """Values of the record field sample_type: the first half of a head's experts is for the first, the other half for
    the second (LoRAMoE)."""
    ffn_steps: PositiveInt = 50
    """Steps of MoT's stage I, which trains only the MLP experts, with normalized gradients."""
    attention_steps: PositiveInt = 50
    """Steps of MoT's stage II, which trains only the attention experts. Stage III trains the MLP experts again, without
    end."""
    updates_per_batch: PositiveInt = 1
    """Updates made with each batch. The prequential loss is the one before the first."""
    rehearsal: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the records of each update that are earlier records of the same regime: at 0.25, one for every three new
    ones, drawn from a sample of those that it was trained on. 0: no record is kept after its update."""
    rehearsal_records: PositiveInt = 64
    """Maximum records kept per regime for rehearsal. They are part of every snapshot."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Maximum global norm of the gradient; a larger one is scaled down to it. null: no maximum."""
    activation_checkpointing: bool = False
    """Whether a training pass keeps only the inputs of the decoder's layers, and computes each layer again in the
    backward pass: much less memory, more time. Freed memory then goes back to the system at once. It does not change
    what is learned."""
    max_bad_batches: PositiveInt = 3
    """Consecutive batches with a non-finite loss or gradient that cause a rollback to the last snapshot."""


class ProbeSettings(Section):
    """Probe of a new regime before training on it."""

    enabled: bool = True
    """Whether new regimes are compared with known ones: to choose the adapter to start from, or for a CP bias."""
    warmup_tokens: PositiveInt | None = None
    """Tokens of the new regime that the transient expert is trained on, where regimes share experts; by default 10,000
    for text and 100,000 for image-text (CP-MoE)."""
    lr: PositiveFloat | None = None
    """Learning rate of the transient expert; by default the learner's."""
    similarity_tokens: PositiveInt = 1024
    """Tokens of a new regime on which it is compared with what is known, and of a returning one on which its return is
    checked."""
    max_returns_refused: float = Field(default=0.01, ge=0.0, lt=1.0)
    """Share of true returns that may be refused. Records whose inputs match a known regime, but whose losses under its
    adapter are higher than the regime's own (at this level), begin a new regime. 0: the inputs decide. Only where each
    regime has its own adapter."""


class ConsolidateSettings(Section):
    """Protection of what was learned from earlier regimes."""

    anchor_strength: NonNegativeFloat | None = None
    """Weight of the penalty that holds important weights at their anchors; 0 for none; lambda in CP-MoE eq. 15. By
    default the preset's."""
    importance: Importance | None = None
    """Where importance is measured: path, along the experts' training; transient, along the transient expert's (CP-MoE
    eq. 6, 7), weighted by CKA (eq. 13). By default transient for presets cp-moe and mh-cp-moe, and path for others."""
    similarity_mask: bool = True
    """Whether importance from a transient expert is weighted by CKA; if not, all experts get the same."""
    damping: PositiveFloat = 1e-3
    """Damping of importance; xi in CP-MoE eq. 7."""
    accumulation: Accumulation | None = None
    """How the importance of several regimes adds up. sum: as published in CP-MoE (eq. 6, 7, 13); it grows with every
    step, also by gradient noise, and holds a regime that returns by its own importance. per_regime: without the part of
    the noise, bounded for each regime however long it lasts or often it returns, and never held against the regime that
    made it. By default sum for presets cp-moe and mh-cp-moe, and per_regime for the others."""


class ShiftSettings(Section):
    """When a shift is declared, and how many regimes are remembered."""

    enabled: bool = True
    """Whether shifts are detected; if not, the whole stream is one regime."""
    false_alarms_per_million: PositiveFloat = 1.0
    """Maximum expected false alarms per million records of a stationary stream, of all tests together. The tests'
    thresholds are quantiles for independent records; where neighbours are alike, there are more."""
    lookahead_records: NonNegativeInt = 16
    """Records buffered before training, so that a shift is detected before its first record is trained on."""
    min_dwell_records: PositiveInt = 64
    """Minimum records in a new regime before the tests of changes may find that the stream left it. Two regimes as
    unlike as tasks with different instructions are separated earlier."""
    max_regimes: int = Field(default=256, ge=2, le=4096)
    """Maximum regimes remembered; may grow between runs. Each takes about 60 kB of memory and of a snapshot, more where
    records are long. A regime's own adapter takes three times its size in memory if it is one of
    adapter.max_in_memory, and up to four times on disk."""


class HoldoutSettings(Section):
    """Records of each regime that are never trained on and measure forgetting continuously."""

    every_records: NonNegativeInt = 20
    """Interval, in records of a regime, at which one is held out; 0 holds out none."""
    records_per_regime: PositiveInt = 16
    """Maximum hold-out records kept per regime, a uniform sample of those held out."""
    time_share: float = Field(default=0.01, ge=0.0, le=0.5)
    """Maximum fraction of training time spent on measuring; idle time does not count. Half of it is for scoring
    hold-out records and canaries, half for the untouched backbone's loss on a sample of records, for /v1/history."""
    canaries: tuple[Path, ...] = ()
    """Files of records that are never trained on and show harm outside of the stream: one JSON object per line, in the
    form of the topic's records, with an optional key slice. After a snapshot, each regime that changed is scored on
    them with its weights. With a section publish, a version that is worse on a slice than the untouched backbone is
    held back."""
