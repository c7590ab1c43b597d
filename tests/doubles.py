"""A random two-layer backbone on disk, and examples for it: test doubles of a real model and stream."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamlearn.stream.record import IGNORED, Example

if TYPE_CHECKING:
    import torch

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test of a small tokenizer",
    "what is the capital of France? the capital of France is Paris",
)
VOCAB_SIZE = 320
"""A small round number: 256 bytes, the control tokens and a few merges."""

Architecture = Literal["qwen3", "llama", "mistral", "gemma", "gemma3_text"]
"""Model types, by transformers' names."""


def tiny_backbone(
    folder: Path,
    *,
    architecture: Architecture = "qwen3",
    vocab_size: int = VOCAB_SIZE,
    dtype: "torch.dtype | None" = None,
    sliding_window: int | None = None,
    tied: bool = False,
    seed: int = 0,
) -> Path:
    """Save a model of hidden size 32 with its tokenizer; return `folder`, for `backbone.model`.

    The weights depend only on the arguments, and are large enough that every prediction depends on all earlier tokens.
    `sliding_window` applies to mistral and gemma3_text. With `tied` the output linear has the weight of the embeddings.
    The default dtype is float32.
    """
    import torch  # noqa: PLC0415 - to keep the import of this module fast
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from benchmarks.backbones.pretrain import train_tokenizer  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(architecture, vocab_size, sliding_window, tied=tied))
    model.to(dtype or torch.float32).save_pretrained(folder)
    train_tokenizer(list(SENTENCES) * 4, vocab_size).save_pretrained(folder)
    return folder


def _config(architecture: Architecture, vocab_size: int, sliding_window: int | None, *, tied: bool) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415

    window = {} if sliding_window is None else {"sliding_window": sliding_window}
    return AutoConfig.for_model(
        architecture,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.3,  # at the usual 0.02 attention hardly affects the logits and would not reveal a leak
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **window,
    )


def example(input_ids: Sequence[int], *, prompt_length: int = 1) -> Example:
    """Build an example whose tokens from `prompt_length` on are learned."""
    labels = [IGNORED] * prompt_length + list(input_ids[prompt_length:])
    return Example(np.array(input_ids, dtype=np.int32), np.array(labels, dtype=np.int32))


def random_examples(
    lengths: Sequence[int], *, vocab_size: int = VOCAB_SIZE, prompt_length: int = 1, seed: int = 0
) -> tuple[Example, ...]:
    """Build one example per length from random tokens other than control tokens, determined by the arguments."""
    rng = np.random.default_rng(seed)
    return tuple(
        example(rng.integers(8, vocab_size, size=length).tolist(), prompt_length=prompt_length) for length in lengths
    )


class SetClock:
    """A clock that shows what a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
