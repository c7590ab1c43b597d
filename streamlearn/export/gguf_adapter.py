"""A plain LoRA as an adapter of llama.cpp: `llama-cli -m BACKBONE.gguf --lora adapter.gguf`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import ConfigError, UsageError
from streamlearn.export.plain_lora import PlainLora

FILE = "adapter.gguf"
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
}
"""`model_type` of transformers -> architecture of llama.cpp."""
_ROTATES_PAIRS = ("llama", "smollm3")
"""Architectures for which llama.cpp rotates neighbouring features of queries and keys. Transformers rotates the halves
of a head against each other, so the rows of these projections change places."""


def check(config: Any) -> None:
    """Check that a backbone of this configuration can be exported.

    Raises:
        UsageError: package gguf is missing.
        ConfigError: llama.cpp has no such architecture, or it is not supported here.
    """
    if find_spec("gguf") is None:
        raise UsageError("--format gguf needs package gguf: pip install 'streamlearn[gguf]'")
    if config.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"--format gguf: expected a backbone of type {', '.join(ARCHITECTURES)}, found {config.model_type}; use "
            "--format peft, and convert_lora_to_gguf.py of llama.cpp"
        )


def write(folder: Path, lora: PlainLora, config: Any) -> None:
    """Write `adapter.gguf`, in float32, into an existing folder. `config` is the backbone's, see `check`."""
    import gguf  # noqa: PLC0415 - an optional dependency

    name = ARCHITECTURES[config.model_type]
    architecture = next(each for each, label in gguf.MODEL_ARCH_NAMES.items() if label == name)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(folder / FILE, name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(lora.alpha))
    for linear, matrices in lora.layers.items():
        B_ON = matrices.B_ON.numpy()
        if name in _ROTATES_PAIRS and linear.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if linear.endswith("q_proj") else config.num_key_value_heads
            B_ON = _paired(B_ON, heads)
        target = names.get_name(linear)
        assert target is not None, f"llama.cpp has no tensor for {linear}"
        writer.add_tensor(f"{target}.weight.lora_a", matrices.A_ND.numpy())
        writer.add_tensor(f"{target}.weight.lora_b", B_ON)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(B_ON: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put feature i of the first half of each head before feature i of the second half.

    >>> _paired(np.arange(4, dtype=np.float32)[:, None], 1)[:, 0].tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    num, rank = B_ON.shape
    return np.ascontiguousarray(B_ON.reshape(heads, 2, num // heads // 2, rank).swapaxes(1, 2).reshape(num, rank))
