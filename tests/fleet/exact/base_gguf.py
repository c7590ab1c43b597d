"""A backbone of type Llama as a float32 GGUF file, which llama.cpp loads beside the exported adapters."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors.torch import load_file as load_torch
from transformers import AutoConfig


def write_base(backbone: Path, file: Path) -> None:
    """Write the model's weights and its vocabulary; texts are encoded and decoded elsewhere."""
    config = AutoConfig.from_pretrained(backbone)
    assert config.model_type == "llama", f"expected a backbone of type llama, found {config.model_type}"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _vocabulary(writer, backbone, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in _weights(backbone).items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, f"llama.cpp has no tensor for {name}"
        writer.add_tensor(target, _ordered(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(writer: gguf.GGUFWriter, backbone: Path, config: Any) -> None:
    tokenizer = orjson.loads((backbone / "tokenizer.json").read_bytes())
    ids = {**tokenizer["model"]["vocab"], **{each["content"]: each["id"] for each in tokenizer["added_tokens"]}}
    tokens = {number: token for token, number in ids.items()}
    control = {each["id"] for each in tokenizer["added_tokens"] if each["special"]}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([tokens.get(i, f"[unused {i}]") for i in range(config.vocab_size)])
    writer.add_token_types([kinds[i in control] for i in range(config.vocab_size)])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config.eos_token_id)


def _weights(backbone: Path) -> dict[str, NDArray[np.float32]]:
    return {name: weight.float().numpy() for name, weight in load_torch(backbone / "model.safetensors").items()}


def _ordered(name: str, weight: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """Rows of queries and keys in llama.cpp's order, which rotates neighboring features, not halves of a head."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    heads = config.num_attention_heads if name.endswith("q_proj.weight") else config.num_key_value_heads
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))
