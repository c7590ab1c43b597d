"""A backbone's eyes: what its own processor makes of an image, one image at a time.

Processors take whole conversations. What of their work depends on an image alone is asked for here with nothing but the
image's placeholder as text, so that a record's words stay with our own encoder, which text cannot fool. Two things that
differ between families are found out by asking, not by name:

placeholder   what a chat template writes for an image, with what it puts around it (a start and an end in Qwen's)
axes          of two images in one call, which axis of each feature has grown

A processor's work on text costs as much as that on a small image, and depends on the image's size alone: it is done
once a size. Whether the processor's part for images gives the same features without it is tried first.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from streamlearn.errors import ConfigError
from streamlearn.stream.images import ImageInputs

_NO_VIDEO = "video_processor"  # needs torchvision, and no record holds a video
_SAID = "\N{PILCROW SIGN}"
_NOT_FEATURES = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
MAX_SIZES = 1024
"""Sizes of images whose token ids are remembered."""
_GRID = "image_grid_thw"  # the Qwen family's sizes of images, in patches


class ProcessorVision:
    """`VisionProcessor` by a Hugging Face processor."""

    def __init__(self, processor: Any, model: Any) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str):
            raise ConfigError(f"the backbone's processor, {type(processor).__name__}, names no image_token")
        self._processor = processor
        self._token = token
        tokenizer = processor.tokenizer
        self.image_token = int(tokenizer.convert_tokens_to_ids(token))
        self._bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        wrapped = _placeholder(processor) or token
        self.placeholder = tuple(tokenizer(wrapped, add_special_tokens=False)["input_ids"])
        if self.placeholder.count(self.image_token) != 1:
            raise ConfigError(f"the backbone's chat template writes {wrapped!r} for an image, without one {token}")
        self._rope: Callable[..., Any] | None = getattr(model.model, "get_rope_index", None)
        self.axes: Mapping[str, int] = MappingProxyType(self._find_axes())
        self._ids_of_size: dict[tuple[int, int], tuple[int, ...]] = {}
        self._direct = all(self._same_without_text(Image.new("RGB", size, "teal")) for size in ((64, 64), (96, 40)))

    def inputs(self, image: Image.Image) -> ImageInputs:
        """See `VisionProcessor.inputs`."""
        known = self._ids_of_size.get(image.size) if self._direct else None
        if known is not None:
            return ImageInputs(known, self._features(image))
        ids, features = self._ask([image])
        if len(self._ids_of_size) < MAX_SIZES:
            self._ids_of_size[image.size] = tuple(ids)
        return ImageInputs(tuple(ids), features)

    def positions(self, input_ids: NDArray[np.int32], inputs: Sequence[ImageInputs]) -> NDArray[np.int64] | None:
        """See `VisionProcessor.positions`: three coordinates per token in the Qwen family (multimodal RoPE)."""
        if self._rope is None or not inputs:
            return None
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        grid = torch.from_numpy(np.concatenate([inputs.features[_GRID] for inputs in inputs]))
        kinds = (ids == self.image_token).int()
        positions, _ = self._rope(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        found: NDArray[np.int64] = positions[:, 0].numpy()
        return found

    def _features(self, image: Image.Image) -> dict[str, NDArray[np.generic]]:
        """By the processor's part for images alone."""
        given = self._processor.image_processor(images=[[image]], return_tensors="np")
        return {name: np.asarray(given[name]) for name in self.axes}

    def _same_without_text(self, image: Image.Image) -> bool:
        try:
            alone = self._features(image)
        except (KeyError, TypeError, ValueError):  # it needs what the processor tells it
            return False
        whole = self._ask([image])[1]
        return all(np.array_equal(alone[name], whole[name]) for name in self.axes)

    def _ask(self, images: list[Image.Image]) -> tuple[list[int], dict[str, NDArray[np.generic]]]:
        """Token ids in the place of as many image tokens, and features with the axes that the processor gives."""
        given = self._processor(text=[self._token * len(images)], images=[images], return_tensors="np")
        ids: list[int] = given["input_ids"][0].tolist()
        if ids[:1] == self._bos:
            ids = ids[1:]
        return ids, {name: np.asarray(value) for name, value in given.items() if name not in _NOT_FEATURES}

    def _find_axes(self) -> dict[str, int]:
        one, two = (self._ask([Image.new("RGB", (64, 64))] * number)[1] for number in (1, 2))
        axes = {}
        for name, feature in one.items():
            grown = [axis for axis, size in enumerate(feature.shape) if two[name].shape[axis] == 2 * size]
            if two[name].ndim != feature.ndim or len(grown) != 1:
                raise ConfigError(
                    f"the backbone's processor gives {name} of shape {feature.shape} for one image and "
                    f"{two[name].shape} for two: they cannot be joined along one axis"
                )
            axes[name] = grown[0]
        return axes


def load_processor(folder: Path, config: Any) -> Any:
    """The processor of a model's folder, without its part for videos.

    Raises:
        ConfigError: it has none, or one that needs a package that is not installed.
    """
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ConfigError(f"backbone: this transformers knows no processor of images for {config.model_type}")
    still = without_video(getattr(transformers, name))
    try:
        return still.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"backbone: the processor of images in {folder} cannot be loaded: {error}") from error


def without_video(whole: Any) -> Any:
    """The processor's class less the part that needs torchvision."""
    absent = [None] if _NO_VIDEO in inspect.signature(whole.__init__).parameters else []

    def attributes(cls: Any, /) -> list[str]:
        del cls
        return [attribute for attribute in whole.get_attributes() if attribute != _NO_VIDEO]

    def build(cls: Any, /, parts: Sequence[Any], settings: Any, **kwargs: Any) -> Any:
        return whole.from_args_and_dict.__func__(cls, [*parts, *absent], settings, **kwargs)

    changed = {"get_attributes": classmethod(attributes), "from_args_and_dict": classmethod(build)}
    return type(whole.__name__, (whole,), changed)


def _placeholder(processor: Any) -> str | None:
    """What the chat template writes for an image beside a word; None where there is no template, or none for images."""
    words = {"type": "text", "text": _SAID}
    try:
        without, with_image = (
            processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            for content in ([words], [{"type": "image"}, words])
        )
    except Exception:  # noqa: BLE001 - a template is its author's program; one that cannot do images is not used
        return None
    before, _, behind = without.partition(_SAID)
    head, _, tail = with_image.partition(_SAID)
    if not head.startswith(before) or tail != behind:
        return None
    return head[len(before) :] or None
