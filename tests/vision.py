"""Random image-text models of every supported family on disk, and images for them."""

import base64
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.doubles import SENTENCES

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
    "initializer_range": 0.2,
}
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TILE_TOKENS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_IDEFICS_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *_TILE_TOKENS)


def make_image(seed: int = 0, size: tuple[int, int] = (40, 50), kind: str = "PNG") -> bytes:
    """An image file of coarse random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 10, size[0] // 10, 3), dtype=np.uint8)
    out = BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(out, kind)
    return out.getvalue()


def as_base64(data: bytes) -> str:
    """The image as a field of a record."""
    return base64.b64encode(data).decode()


def tiny_vision_backbone(folder: Path, family: str, seed: int = 0) -> Path:
    """Save a random model of hidden size 32 with its processor; return `folder`, for `backbone.model`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, processor = FAMILIES[family]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(names: tuple[str, ...]) -> Any:
    from benchmarks.backbones.pretrain import train_tokenizer  # noqa: PLC0415

    tokenizer = train_tokenizer(list(SENTENCES) * 4, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    return tokenizer


def _without_video(processor: Any) -> Any:
    """A processor class that does not need torchvision."""
    from streamlearn.backbone.vision import without_video  # noqa: PLC0415

    return without_video(processor)


def _llava() -> tuple[Any, Any]:
    import transformers as t  # noqa: PLC0415
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil  # noqa: PLC0415

    tokenizer = _tokenizer(("<image>",))
    vision = t.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=t.LlamaConfig(**TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    processor = t.LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
        num_additional_image_tokens=1,
    )
    return t.LlavaForConditionalGeneration(config), processor


def _qwen(name: str, vision: dict[str, Any], **text: Any) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        import transformers as t  # noqa: PLC0415
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: PLC0415

        tokenizer = _tokenizer(_QWEN_TOKENS)
        start, end, image, video = tokenizer.convert_tokens_to_ids(list(_QWEN_TOKENS))
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
        config = getattr(t, f"{name}Config")(
            vision_config={"depth": 2, "num_heads": 2, "patch_size": 14, **vision},
            text_config={**TEXT, "rope_parameters": rope, **text},
            vision_start_token_id=start,
            vision_end_token_id=end,
            image_token_id=image,
            video_token_id=video,
        )
        processor = _without_video(getattr(t, f"{name}Processor"))(
            image_processor=Qwen2VLImageProcessorPil(
                patch_size=14, size={"shortest_edge": 784, "longest_edge": 12544}, merge_size=2, temporal_patch_size=2
            ),
            tokenizer=tokenizer,
            chat_template=TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
        )
        return getattr(t, f"{name}ForConditionalGeneration")(config), processor

    return build


def _idefics(name: str, image_processor: str, **parts: Any) -> Callable[[], tuple[Any, Any]]:
    def build() -> tuple[Any, Any]:
        import importlib  # noqa: PLC0415

        import transformers as t  # noqa: PLC0415

        tokenizer = _tokenizer(_IDEFICS_TOKENS)
        module = importlib.import_module(f"transformers.models.{image_processor}")
        config = getattr(t, f"{name}Config")(
            vision_config={
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
            },
            text_config=t.LlamaConfig(**TEXT).to_dict(),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
            pad_token_id=1,
        )
        processor = _without_video(getattr(t, f"{name}Processor"))(
            image_processor=getattr(module, f"{name}ImageProcessorPil")(
                size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
            ),
            tokenizer=tokenizer,
            image_seq_len=4,
            chat_template=TEMPLATE.replace("IMAGE", "<image>"),
            **parts,
        )
        return getattr(t, f"{name}ForConditionalGeneration")(config), processor

    return build


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "qwen2-vl": _qwen("Qwen2VL", {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "qwen2.5-vl": _qwen(
        "Qwen2_5_VL",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
    ),
    "qwen3-vl": _qwen(
        "Qwen3VL",
        {
            "hidden_size": 16,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        head_dim=8,
    ),
    "idefics3": _idefics("Idefics3", "idefics3.image_processing_pil_idefics3"),
    "smolvlm": _idefics("SmolVLM", "smolvlm.image_processing_pil_smolvlm", video_processor=None),
}
