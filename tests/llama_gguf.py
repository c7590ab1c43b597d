"""What a GGUF of a Llama model says about it, for tests that write one."""

from typing import Any


def describe(writer: Any, config: Any) -> None:
    """Add the model's sizes.

    Args:
        writer: A `gguf.GGUFWriter` for the architecture llama.
        config: The configuration of transformers.
    """
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
