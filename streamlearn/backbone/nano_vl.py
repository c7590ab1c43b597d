"""The bundled image-text backbone: the nano language model, a small vision tower, and a projector between them.

Its folder has no second copy of the language model: `vision.safetensors` contains vision tower and projector, the other
weights are those of `nano`. The architecture is LLaVA's with a SigLIP-like tower: 64 x 64 pixels in 8 x 8 patches, so
64 tokens per image.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from streamlearn.model_files import NANO, NANO_VL

VISION_WEIGHTS = "vision.safetensors"
IMAGE_SIDE, PATCH = 64, 8
IMAGE_TOKENS = (IMAGE_SIDE // PATCH) ** 2
IMAGE_TOKEN, IMAGE_TOKEN_ID = "<|image|>", 4
VISION: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + IMAGE_TOKEN + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VISION_PREFIXES = ("model.vision_tower.", "model.multi_modal_projector.")


def config() -> Any:
    """Return the architecture."""
    return LlavaConfig(
        vision_config=SiglipVisionConfig(**VISION),
        text_config=AutoConfig.from_pretrained(NANO),
        image_token_index=IMAGE_TOKEN_ID,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def tokenizer() -> Any:
    """Load the tokenizer of the language model."""
    return AutoTokenizer.from_pretrained(NANO)


def processor() -> Any:
    """Build the processor: images are scaled to 64 x 64 pixels in [-1, 1]."""
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}),
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


def assemble(dtype: torch.dtype, *, vision_weights: Path | None = NANO_VL / VISION_WEIGHTS, **options: Any) -> Any:
    """Build the model with its weights.

    Args:
        dtype: Dtype of all weights.
        vision_weights: File with tower and projector; None: random.
        options: Arguments of the model's constructor.
    """
    model = LlavaForConditionalGeneration._from_config(config(), dtype=dtype, **options)
    language = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(NANO / "model.safetensors").items()
        if name.startswith("model.")
    }
    vision = {} if vision_weights is None else load_file(vision_weights)
    missing, unexpected = model.load_state_dict({**language, **vision}, strict=False)
    expected = ("lm_head.weight", *(VISION_PREFIXES if vision_weights is None else ()))
    absent = [name for name in missing if not name.startswith(expected)]
    assert not absent, absent
    assert not unexpected, unexpected
    model.tie_weights()
    return model
