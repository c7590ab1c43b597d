"""How much memory the largest step of a configuration takes, from its architecture and settings.

    M = process + weights + experts + c (activations + max(loss, backward))                         (1)

The largest step has one batch of `stream.batch_tokens` tokens T, in records of `stream.max_tokens` each, all of them
learned. What a decoder layer keeps of it for the backward pass, in bytes a token, e those of the dtype:

    norms        4 per feature that a norm reads: it computes in float32                            (2)
    attention    e (2 Q + 2 G): queries, keys, values and output, of Q and G features               (3)
    attention    e (Q + 2 G) + 6 heads * (tokens attended to), for bfloat16 on a CPU                (4)
    MLP          3 e F: gate, its activation, up, of F features                                     (5)
    adapters     e per feature that adapted linears read, and H K (e R + 9) for each of them;       (6)
                 the 9 are logits, gates and selection, where there is a router

c is the part that glibc does not return to the system, see `runtime.heap`; it was fitted to measured steps. On a GPU,
and where freed memory is returned at once, c = 1. With `learner.activation_checkpointing` a layer keeps e D, its input,
and one layer at a time has the rest. The terms were read off autograd's saved tensors; `streamlearn bench memory`
compares their sum with measured steps. They are those of Qwen3, Llama, Mistral and Gemma on text: images add to it, and
other architectures differ.
"""
# T tokens, F features of the MLP, D hidden size, H heads of an adapter, K experts a head, R rank.

from dataclasses import asdict, dataclass

import torch

from streamlearn.adapters.check import LinearShapes, adapter_bytes, decoder_targets
from streamlearn.adapters.config import HeadLoraConfig
from streamlearn.backbone.attention import BLOCK
from streamlearn.backbone.load import Outline
from streamlearn.backbone.quantization import KINDS
from streamlearn.learner.vocabulary_loss import CPU_LOGITS, GPU_LOGITS
from streamlearn.settings import Settings

FLOAT32 = 4
"""Bytes of a number of an expert, its gradient and its moments."""
KEPT_BY_GLIBC = 1.35
"""c of eq. (1) on a CPU without checkpointing: 1.16 to 1.63 in six configurations."""
READ = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""What the estimate reads of a model's configuration."""


@dataclass(frozen=True)
class StepMemory:
    """The terms of eq. (1), bytes."""

    process: int
    """What the process has before it loads the model."""
    weights: int
    """The frozen backbone."""
    experts: int
    """Adapters in memory, with the optimizer's moments, and the gradient of one."""
    activations: int
    """What the forward pass keeps for the backward pass."""
    loss: int
    """A chunk of logits, and the gradient of the hidden states."""
    backward: int
    """Gradients of one layer's activations, and with checkpointing those activations."""
    kept_by_allocator: float
    """c."""

    @property
    def total(self) -> int:
        """The largest that the process gets."""
        step = self.activations + max(self.loss, self.backward)
        return self.process + self.weights + self.experts + int(self.kept_by_allocator * step)

    def __str__(self) -> str:
        sizes = {name: size for name, size in asdict(self).items() if name != "kept_by_allocator"}
        return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())


def can_estimate(shape: Outline) -> bool:
    """Whether the model's configuration says all that `step_memory` reads."""
    return all(hasattr(shape.config.get_text_config(), name) for name in READ)


def step_memory(
    settings: Settings,
    shape: Outline,
    adapter: HeadLoraConfig,
    *,
    dtype: torch.dtype,
    on_cpu: bool,
    adapters: int,
    process: int,
) -> StepMemory:
    """Estimate the memory of the largest step.

    Args:
        settings: The sections `backbone`, `stream` and `learner`.
        shape: The backbone, which `can_estimate`.
        adapter: The adapter.
        dtype: That of the activations.
        on_cpu: Whether the step is computed on a CPU; if not, on a GPU.
        adapters: Number of adapters in memory.
        process: What the process has on the device before, bytes.
    """
    size, tokens = dtype.itemsize, settings.stream.batch_tokens
    text = shape.config.get_text_config()
    one = adapter_bytes(adapter, shape.linears)
    layer = _Layer(shape, adapter, size=size, by_products=on_cpu and dtype == torch.bfloat16)
    whole = tokens * layer.bytes_per_token(settings.stream.max_tokens)
    layers = text.num_hidden_layers - adapter.first_layer
    transient = tokens * size * (3 * text.intermediate_size + 2 * text.hidden_size)
    if settings.learner.activation_checkpointing:
        activations, transient = layers * tokens * text.hidden_size * size, transient + whole
    else:
        activations = layers * whole
    casts = one // 3 * size // FLOAT32 if size < FLOAT32 else 0
    logits = min(CPU_LOGITS if on_cpu else GPU_LOGITS, tokens * text.vocab_size)
    return StepMemory(
        process=process,
        weights=_weight_bytes(settings, shape, size),
        experts=adapters * one + one // 3,
        activations=activations + casts,
        loss=logits * (2 * 4 + (size if size < FLOAT32 else 0)) + tokens * text.hidden_size * size,
        backward=transient,
        kept_by_allocator=KEPT_BY_GLIBC if on_cpu and not settings.learner.activation_checkpointing else 1.0,
    )


def _weight_bytes(settings: Settings, shape: Outline, size: int) -> int:
    if settings.backbone.quantization == "none":
        return shape.num_parameters * size
    quantized = sum(i * o for i, o in shape.linears.values())
    stored = quantized * KINDS[settings.backbone.quantization].bytes_per_weight
    return (shape.num_parameters - quantized) * size + int(stored)


class _Layer:
    """What one decoder layer keeps."""

    def __init__(self, shape: Outline, adapter: HeadLoraConfig, *, size: int, by_products: bool) -> None:
        text = shape.config.get_text_config()
        self._size, self._by_products, self._adapter = size, by_products, adapter
        self._heads: int = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // self._heads
        self._queries: int = self._heads * width
        self._keys: int = text.num_key_value_heads * width
        self._hidden: int = text.hidden_size
        self._mlp: int = text.intermediate_size
        of_heads = {"q_norm": self._queries, "k_norm": self._keys}
        self._norms: int = sum(of_heads.get(name, self._hidden) for name in shape.norms)
        chosen = decoder_targets(adapter, shape.linears)
        self._adapted: LinearShapes = {name.rpartition(".")[2]: each for name, each in chosen.items()}

    def bytes_per_token(self, record_tokens: int) -> int:
        """Eq. (2) to (6), in a batch of records of this length."""
        return 4 * self._norms + self._attention(record_tokens) + 3 * self._size * self._mlp + self._experts()

    def _attention(self, record_tokens: int) -> int:
        """Eq. (3) or (4)."""
        if not self._by_products:
            return self._size * 2 * (self._queries + self._keys)
        attended = (record_tokens + BLOCK) // 2  # mean over the tokens of a record, whose blocks end at multiples
        return self._size * (self._queries + 2 * self._keys) + 6 * self._heads * attended

    def _experts(self) -> int:
        """Eq. (6)."""
        config = self._adapter
        inputs = {"qkv": self._hidden, "o": self._queries, "gate_up": self._hidden, "down": self._mlp}
        read = {_input_of(name) for name in self._adapted}
        each = config.num_heads * config.num_experts * (self._size * config.r + (9 if config.routed else 0))
        return self._size * sum(inputs[name] for name in read) + len(self._adapted) * each


def _input_of(linear: str) -> str:
    """What a linear reads; several read the same."""
    return {"o_proj": "o", "gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}.get(linear, "qkv")
