"""A random two-layer backbone on disk, and examples for it: what a test takes where the daemon takes a real model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from streamlearn.stream.decode import Example
from streamlearn.stream.encode import IGNORED

if TYPE_CHECKING:
    import torch

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test of a small tokenizer",
    "what is the capital of France? the capital of France is Paris",
)
VOCAB_SIZE = 320
"""Smallest round number that holds 256 bytes, the control tokens and a few merges."""

Architecture = Literal["qwen3", "llama", "mistral", "gemma", "gemma3_text"]
"""Transformers' own names of the kinds of model."""


def tiny_backbone(  # the keyword arguments are what tests vary
    folder: Path,
    *,
    architecture: Architecture = "qwen3",
    vocab_size: int = VOCAB_SIZE,
    dtype: "torch.dtype | None" = None,
    sliding_window: int | None = None,
    seed: int = 0,
) -> Path:
    """Save a model of hidden size 32 with its tokenizer and return `folder`, fit for `backbone.model`.

    Weights are a function of the arguments and are large enough that every token's prediction depends on what stands
    before it. float32 unless `dtype` says otherwise; `sliding_window` is read by mistral and gemma3_text.
    """
    import torch  # noqa: PLC0415 - importing this module stays cheap
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    from streamlearn.backbone.pretrain import train_tokenizer  # noqa: PLC0415

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(_config(architecture, vocab_size, sliding_window))
    model.to(dtype or torch.float32).save_pretrained(folder)
    train_tokenizer(list(SENTENCES) * 4, vocab_size).save_pretrained(folder)
    return folder


def _config(architecture: Architecture, vocab_size: int, sliding_window: int | None) -> Any:
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
        initializer_range=0.3,  # at the usual 0.02 attention hardly moves the logits and nothing would show a leak
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
        **window,
    )


def example(input_ids: Sequence[int], *, prompt_length: int = 1) -> Example:
    """Tokens of which those before `prompt_length` are read and the others learned."""
    labels = [IGNORED] * prompt_length + list(input_ids[prompt_length:])
    return Example(np.array(input_ids, dtype=np.int32), np.array(labels, dtype=np.int32))


def random_examples(
    lengths: Sequence[int], *, vocab_size: int = VOCAB_SIZE, prompt_length: int = 1, seed: int = 0
) -> tuple[Example, ...]:
    """One example a length, of random tokens without control tokens; a function of the arguments."""
    rng = np.random.default_rng(seed)
    return tuple(
        example(rng.integers(8, vocab_size, size=length).tolist(), prompt_length=prompt_length) for length in lengths
    )
