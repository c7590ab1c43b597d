"""Images in the middle of text: where they stand, and what stands there instead.

A record's words go through our own encoder with one placeholder for each image; then the placeholder's one image token
becomes what the backbone's processor makes of that image.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.encode import IGNORED, Encoder, Message
from streamlearn.stream.images import RecordImage, Vision

IMAGE_MARK = "<image>"


class ImagePlaceholders:
    """A decoder's way with images; without `vision` there are none."""

    def __init__(self, vision: Vision | None, limits: StreamSettings) -> None:
        self.vision = vision
        self._limits = limits

    def images(self, value: Mapping[str, Any]) -> tuple[RecordImage, ...]:
        """The images of a record.

        Raises:
            RecordError: one of them cannot be used.
        """
        if "image" not in value:
            return ()
        if self.vision is None:
            raise RecordError(Reason.BAD_FORM, "image: this backbone reads text alone")
        several = isinstance(value["image"], list)
        items = value["image"] if several else [value["image"]]
        most = self._limits.max_images
        if not 1 <= len(items) <= most:
            raise RecordError(Reason.TOO_LARGE, f"image must hold 1 to {most} images (max_images), found {len(items)}")
        return tuple(
            RecordImage.from_base64(item, f"image[{i}]" if several else "image", self.vision, self._limits)
            for i, item in enumerate(items)
        )

    def before(self, encoder: Encoder, prompt: str, images: Sequence[RecordImage]) -> list[int]:
        """A prompt's tokens, with the placeholder of each image in its place."""
        pieces = prompt.split(IMAGE_MARK) if images else [prompt]
        if len(pieces) == 1:
            pieces = [""] * len(images) + pieces
        if len(pieces) != len(images) + 1:
            raise RecordError(
                Reason.BAD_FORM,
                f"prompt must say {IMAGE_MARK} once for each of {len(images)} images or not at all, "
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
        """What each image's own tokens are, in the place of its one placeholder; and where they begin."""
        if self.vision is None:
            return ids, labels, ()
        token, inputs = self.vision.image_token, iter(images)
        if ids.count(token) != len(images):
            raise RecordError(
                Reason.BAD_FORM, f"{len(images)} images must have as many places, found {ids.count(token)}"
            )
        new_ids: list[int] = []
        new_labels: list[int] = []
        places: list[int] = []
        for one, label in zip(ids, labels, strict=True):
            if one == token:
                places.append(len(new_ids))
                new_ids += next(inputs).inputs.token_ids
                new_labels += [IGNORED] * (len(new_ids) - len(new_labels))
            else:
                new_ids.append(one)
                new_labels.append(label)
        return new_ids, new_labels, tuple(places)

    def positions(self, ids: NDArray[np.int32], images: Sequence[RecordImage]) -> NDArray[np.int64] | None:
        """See `Vision.positions`."""
        if self.vision is None:
            return None
        return self.vision.positions(ids, [image.inputs for image in images])


def placed(messages: Sequence[Message], images: Sequence[RecordImage]) -> list[Message]:
    """The messages with a place for every image: before the first user's words where no message has one."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    if not images or any(part["type"] == "image" for part in parts):
        return list(messages)
    placed = list(messages)
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    content = placed[at]["content"]
    words = content if isinstance(content, list) else [{"type": "text", "text": content}]
    placed[at] = {**placed[at], "content": [{"type": "image"}] * len(images) + words}
    return placed
