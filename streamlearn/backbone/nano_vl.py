"""The bundled image-text backbone: the nano language model, a small vision tower, and a projector between them.

Its folder holds no second copy of the language model: `eyes.safetensors` is the tower and the projector, the rest
comes from `nano`. The architecture is LLaVA's with a SigLIP-shaped tower: 64 x 64 pixels in 8 x 8 patches, 64 tokens.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipVisionConfig,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

NANO = Path(__file__).parent / "nano"
FOLDER = Path(__file__).parent / "nano-vl"
EYES = "eyes.safetensors"
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
_PARTS = ("model.vision_tower.", "model.multi_modal_projector.")


def config() -> Any:
    """The architecture."""
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
    """The language model's own."""
    return AutoTokenizer.from_pretrained(NANO)


def processor() -> Any:
    """Images to 64 x 64, -1 to 1; the tokenizer is the language model's."""
    return LlavaProcessor(
        image_processor=SiglipImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE}),
        tokenizer=tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        image_token=IMAGE_TOKEN,
        chat_template=CHAT_TEMPLATE,
    )


def assemble(dtype: torch.dtype, *, eyes: Path | None = FOLDER / EYES, **options: Any) -> Any:
    """The whole model; without `eyes` tower and projector are random. `options` go to the architecture."""
    model = LlavaForConditionalGeneration._from_config(config(), dtype=dtype, **options)
    words = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(NANO / "model.safetensors").items()
        if name.startswith("model.")
    }
    seen = {} if eyes is None else load_file(eyes)
    missing, unexpected = model.load_state_dict({**words, **seen}, strict=False)
    left = [name for name in missing if name != "lm_head.weight" and (eyes is not None or not name.startswith(_PARTS))]
    assert not left, left
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def save_eyes(model: Any, file: Path) -> None:
    """Tower and projector alone, in bfloat16."""
    tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in model.state_dict().items() if n.startswith(_PARTS)}
    save_file(tensors, file)
