"""Image inputs of a backbone, computed by its own Hugging Face processor, one image at a time.

Processors expect text together with its images. Here the processor gets each image with only the image's placeholder
as text: the text of a record is encoded by our own encoder, in which text cannot imitate an image. Two properties that
differ between model families are detected, not looked up by name:

placeholder   the chat template's text for an image, with the tokens around it (start and end in Qwen's)
axes          the axis of each feature along which images are concatenated: the one that doubles for two images

Processing the placeholder takes as long as processing a small image, and its result depends only on the image's size:
it is cached by size, provided that the processor's image part returns the same features when called without text.
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
from streamlearn.stream.record import ImageInputs

_VIDEO = "video_processor"  # needs torchvision, and records have no videos
_MARKER = "\N{PILCROW SIGN}"
_NOT_FEATURES = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
MAX_SIZES = 1024
"""Maximum image sizes whose token ids are cached."""
_GRID = "image_grid_thw"  # image sizes in patches, in the Qwen family


class ProcessorVision:
    """`VisionProcessor` on top of a Hugging Face processor."""

    def __init__(self, processor: Any, model: Any) -> None:
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str):
            raise ConfigError(f"backbone: the processor must have an image_token, {type(processor).__name__} has none")
        self._processor = processor
        self._token = token
        tokenizer = processor.tokenizer
        self.image_token = int(tokenizer.convert_tokens_to_ids(token))
        self._bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
        wrapped = _placeholder(processor) or token
        self.placeholder = tuple(tokenizer(wrapped, add_special_tokens=False)["input_ids"])
        if self.placeholder.count(self.image_token) != 1:
            raise ConfigError(
                f"backbone: the chat template must write one {token} for an image, found {wrapped!r} instead"
            )
        self._rope: Callable[..., Any] | None = getattr(model.model, "get_rope_index", None)
        self.axes: Mapping[str, int] = MappingProxyType(self._find_axes())
        self._ids_of_size: dict[tuple[int, int], tuple[int, ...]] = {}
        self._direct = all(self._same_without_text(_slope(size)) for size in ((64, 64), (96, 40)))

    def save(self, folder: Path) -> None:
        """Write the processor's files into a folder."""
        self._processor.save_pretrained(folder)

    def inputs(self, image: Image.Image) -> ImageInputs:
        cached = self._ids_of_size.get(image.size) if self._direct else None
        if cached is not None:
            return ImageInputs(cached, self._features(image))
        ids, features = self._process([image])
        if len(self._ids_of_size) < MAX_SIZES:
            self._ids_of_size[image.size] = tuple(ids)
        return ImageInputs(tuple(ids), features)

    def positions(self, input_ids: NDArray[np.int32], inputs: Sequence[ImageInputs]) -> NDArray[np.int64] | None:
        """Return three coordinates per token in the Qwen family (multimodal RoPE)."""
        if self._rope is None or not inputs:
            return None
        ids = torch.from_numpy(input_ids.astype(np.int64))[None]
        grid = torch.from_numpy(np.concatenate([image.features[_GRID] for image in inputs]))
        kinds = (ids == self.image_token).int()
        positions, _ = self._rope(ids, mm_token_type_ids=kinds, image_grid_thw=grid)
        coordinates: NDArray[np.int64] = positions[:, 0].numpy()
        return coordinates

    def _features(self, image: Image.Image) -> dict[str, NDArray[np.generic]]:
        """Compute features by the processor's image part, without text.

        It gets an array with colors first: it would convert an image to one with twice as many copies.
        """
        pixels_CYX = np.moveaxis(np.asarray(image), 2, 0)
        output = self._processor.image_processor(
            images=[[pixels_CYX]], input_data_format="channels_first", return_tensors="np"
        )
        return {name: np.asarray(output[name]) for name in self.axes}

    def _same_without_text(self, image: Image.Image) -> bool:
        try:
            without_text = self._features(image)
        except (KeyError, TypeError, ValueError):  # the image part needs arguments from the processor
            return False
        features = self._process([image])[1]
        return all(np.array_equal(without_text[name], features[name]) for name in self.axes)

    def _process(self, images: list[Image.Image]) -> tuple[list[int], dict[str, NDArray[np.generic]]]:
        """Return the token ids that replace one image token per image, and the processor's features."""
        output = self._processor(text=[self._token * len(images)], images=[images], return_tensors="np")
        ids: list[int] = output["input_ids"][0].tolist()
        if ids[:1] == self._bos:
            ids = ids[1:]
        return ids, {name: np.asarray(value) for name, value in output.items() if name not in _NOT_FEATURES}

    def _find_axes(self) -> dict[str, int]:
        one, two = (self._process([Image.new("RGB", (64, 64))] * number)[1] for number in (1, 2))
        axes = {}
        for name, feature in one.items():
            doubled = [axis for axis, size in enumerate(feature.shape) if two[name].shape[axis] == 2 * size]
            if two[name].ndim != feature.ndim or len(doubled) != 1:
                raise ConfigError(
                    f"backbone: the processor's features of several images must be joined along one axis, found {name} "
                    f"of shape {feature.shape} for one image and {two[name].shape} for two"
                )
            axes[name] = doubled[0]
        return axes


def load_processor(folder: Path, config: Any) -> Any:
    """Load the processor in a model's folder, without its video part.

    Raises:
        ConfigError: there is none, or it needs a package that is not installed.
    """
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise ConfigError(f"backbone: this version of transformers has no image processor for {config.model_type}")
    processor = without_video(getattr(transformers, name))
    try:
        return processor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise ConfigError(f"backbone: the image processor in {folder} cannot be loaded: {error}") from error


def without_video(processor: Any) -> Any:
    """Derive a processor class without the video part, which needs torchvision."""
    absent = [None] if _VIDEO in inspect.signature(processor.__init__).parameters else []

    def attributes(cls: Any, /) -> list[str]:
        del cls
        return [attribute for attribute in processor.get_attributes() if attribute != _VIDEO]

    def build(cls: Any, /, parts: Sequence[Any], settings: Any, **kwargs: Any) -> Any:
        return processor.from_args_and_dict.__func__(cls, [*parts, *absent], settings, **kwargs)

    changed = {"get_attributes": classmethod(attributes), "from_args_and_dict": classmethod(build)}
    return type(processor.__name__, (processor,), changed)


def _slope(size: tuple[int, int]) -> Image.Image:
    """Return an image in which no two colors, rows or columns are alike."""
    slope = Image.linear_gradient("L")
    turned = (slope, slope.rotate(90), slope.rotate(180))
    return Image.merge("RGB", turned).resize(size)


def _placeholder(processor: Any) -> str | None:
    """Return the chat template's text for an image; None without a template that takes images."""
    text = {"type": "text", "text": _MARKER}
    try:
        without, with_image = (
            processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            for content in ([text], [{"type": "image"}, text])
        )
    except Exception:  # noqa: BLE001 - a template can raise anything; one that fails is not used
        return None
    before, _, after = without.partition(_MARKER)
    head, _, tail = with_image.partition(_MARKER)
    if not head.startswith(before) or tail != after:
        return None
    return head[len(before) :] or None
