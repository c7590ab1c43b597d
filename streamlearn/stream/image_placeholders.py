"""Images inside text: their places, and the tokens that stand for them.

A record's text is encoded by our own encoder with one placeholder per image. The image token in each placeholder is
then replaced by the tokens that the backbone's processor computes for that image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.encode import IGNORED, Encoder, Message
from streamlearn.stream.images import RecordImage, VisionProcessor

IMAGE_MARK = "<image>"


class ImagePlaceholders:
    """The image handling of a decoder; without `vision`, records with images are refused."""

    def __init__(self, vision: VisionProcessor | None, limits: StreamSettings) -> None:
        self.vision = vision
        self._limits = limits

    def images(self, value: Mapping[str, Any]) -> tuple[RecordImage, ...]:
        """Decode the images of a record.

        Raises:
            RecordError: one of them cannot be used.
        """
        if "image" not in value:
            return ()
        if self.vision is None:
            raise RecordError(Reason.BAD_FORM, "image: this backbone reads only text")
        is_list = isinstance(value["image"], list)
        items = value["image"] if is_list else [value["image"]]
        limit = self._limits.max_images
        if not 1 <= len(items) <= limit:
            raise RecordError(Reason.TOO_LARGE, f"image must hold 1 to {limit} images (max_images), found {len(items)}")
        return tuple(
            RecordImage.from_base64(item, f"image[{i}]" if is_list else "image", self.vision, self._limits)
            for i, item in enumerate(items)
        )

    def encode_prompt(self, encoder: Encoder, prompt: str, images: Sequence[RecordImage]) -> list[int]:
        """Return a prompt's tokens with one placeholder per image."""
        pieces = prompt.split(IMAGE_MARK) if images else [prompt]
        if len(pieces) == 1:
            pieces = [""] * len(images) + pieces
        if len(pieces) != len(images) + 1:
            raise RecordError(
                Reason.BAD_FORM,
                f"prompt must contain {IMAGE_MARK} once for each of {len(images)} images or not at all, "
                f"found it {len(pieces) - 1} times",
            )
        placeholder = [] if self.vision is None else self.vision.placeholder
        ids = [*encoder.bos]
        for number, piece in enumerate(pieces):
            ids += placeholder if number else []
            ids += encoder.text(piece) if piece else []
        return ids

    def expand(
        self, ids: list[int], labels: list[int], images: Sequence[RecordImage]
    ) -> tuple[list[int], list[int], tuple[int, ...]]:
        """Replace each image token by its image's own tokens; return ids, labels, and where each image begins."""
        if self.vision is None:
            return ids, labels, ()
        image_token, remaining = self.vision.image_token, iter(images)
        found = ids.count(image_token)
        if found != len(images):
            raise RecordError(
                Reason.BAD_FORM, f"a record must have one placeholder per image, found {found} for {len(images)} images"
            )
        new_ids: list[int] = []
        new_labels: list[int] = []
        image_starts: list[int] = []
        for token, label in zip(ids, labels, strict=True):
            if token == image_token:
                image_starts.append(len(new_ids))
                new_ids += next(remaining).inputs.token_ids
                new_labels += [IGNORED] * (len(new_ids) - len(new_labels))
            else:
                new_ids.append(token)
                new_labels.append(label)
        return new_ids, new_labels, tuple(image_starts)

    def positions(self, ids: NDArray[np.int32], images: Sequence[RecordImage]) -> NDArray[np.int64] | None:
        """See `VisionProcessor.positions`."""
        if self.vision is None:
            return None
        return self.vision.positions(ids, [image.inputs for image in images])


def with_image_parts(messages: Sequence[Message], images: Sequence[RecordImage]) -> list[Message]:
    """Add a part for every image at the start of the first user message, unless a message has such parts already."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    if not images or any(part["type"] == "image" for part in parts):
        return list(messages)
    changed = list(messages)
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    content = changed[at]["content"]
    text_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    changed[at] = {**changed[at], "content": [{"type": "image"}] * len(images) + text_parts}
    return changed
