"""A record's images on their way to the model.

A `RecordImage` keeps the bytes that came and makes the model's view of them when it is asked, once: an example that is
trained on is looked at once; one that is kept for later forgets the view, a hundred times larger than the bytes, and
makes it anew. The view is a function of bytes and backbone, so it may.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from streamlearn.settings import StreamSettings
from streamlearn.stream.image_decoding import decode_base64, open_image

WORDS_SIDE = 4
"""A picture's words are of a grid of so many cells a side."""
_CELL = 8  # pixels a side that a cell is looked at with
_LEVELS = 4  # of brightness and of each colour
_BASE = np.array([1, _LEVELS, _LEVELS**2])  # what a cell's three colours are written in as one number
_SALT = 7919


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """What a backbone makes of one image."""

    token_ids: tuple[int, ...]
    """What stands in the place of the image's placeholder."""
    features: Mapping[str, NDArray[np.generic]]
    """The forward pass's arguments, by name."""


class Vision(Protocol):
    """A backbone's eyes."""

    placeholder: tuple[int, ...]
    """Token ids that a prompt gets for an image, one of which is `image_token`."""
    image_token: int
    """Token id that a look's `token_ids` take the place of."""
    axes: Mapping[str, int]
    """Along which axis the features of several images are joined."""

    def inputs(self, image: Image.Image) -> ImageInputs:
        """One RGB image as the model wants it."""

    def positions(self, input_ids: NDArray[np.int32], inputs: Sequence[ImageInputs]) -> NDArray[np.int64] | None:
        """Positions (P, T) of a record's tokens where they are not 0, 1, 2, ...; None where they are."""


class RecordImage:
    """One image of a record; see above. Raises RecordError when it is made of bytes that are none."""

    def __init__(self, data: bytes, vision: Vision, limits: StreamSettings, where: str = "image") -> None:
        self.data = data
        self._vision, self._limits = vision, limits
        image = open_image(data, where, limits)
        self.words = words(image)
        """What the image looks like, coarsely, as a few integers: what shifts are found by."""
        self._inputs: ImageInputs | None = vision.inputs(image)

    @classmethod
    def from_base64(cls, text: object, where: str, vision: Vision, limits: StreamSettings) -> "RecordImage":
        """An image as a record holds it."""
        return cls(decode_base64(text, where), vision, limits, where)

    @property
    def extent(self) -> int:
        """How much the vision tower sees of it, in the unit that pixels are joined in: images, tiles or patches."""
        return int(self.inputs.features["pixel_values"].shape[self.axes["pixel_values"]])

    @property
    def inputs(self) -> ImageInputs:
        """The model's view."""
        if self._inputs is None:
            self._inputs = self._vision.inputs(open_image(self.data, "image", self._limits))
        return self._inputs

    @property
    def axes(self) -> Mapping[str, int]:
        """See `Vision.axes`."""
        return self._vision.axes

    def forget(self) -> None:
        """Keep the bytes alone, until the view is asked for again."""
        self._inputs = None


def words(image: Image.Image) -> NDArray[np.int32]:
    """Integers, equal where images look alike: which colours, contrasts and edges the cells of a 4 x 4 grid have.

    Each once, wherever it is and however often: some ten in all, no more than a question has words, so that neither
    drowns the other when a shift is looked for.
    """
    side = WORDS_SIDE * _CELL
    small = image.resize((side, side), Image.Resampling.BILINEAR, reducing_gap=1.0)
    rgb_YXC = np.asarray(small, dtype=np.float32) / np.float32(256)
    grey_YX: NDArray[np.float32] = rgb_YXC.mean(2)
    down_YX, right_YX = np.zeros_like(grey_YX), np.zeros_like(grey_YX)
    np.abs(grey_YX[1:] - grey_YX[:-1], out=down_YX[:-1])
    np.abs(grey_YX[:, 1:] - grey_YX[:, :-1], out=right_YX[:, :-1])
    colour_NC = np.floor(_by_cell(rgb_YXC).mean(1) * _LEVELS)
    contrast_N = _by_cell(grey_YX).std(1)
    edges_N, leaning_N = _means(down_YX + right_YX), _means(down_YX - right_YX)
    kinds = [
        colour_NC @ _BASE,
        np.floor(np.minimum(contrast_N * 8, 3)),
        np.floor(np.minimum(edges_N * 32, 3)),
        np.sign(np.round(leaning_N * 32)) + 1,
    ]
    width, height = image.size
    found = [number * 101 + int(level) + 1 for number, kind in enumerate(kinds) for level in sorted(set(kind.tolist()))]
    found += [round(2 * math.log2(width / height)) + 512, round(math.log2(width * height)) + 2048]
    return np.array([word * _SALT & 0x7FFFFFFF for word in found], dtype=np.int32)


def _by_cell(image_YX: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each cell's pixels in a row: (side, side, ...) -> (cells, pixels, ...)."""
    colours = image_YX.shape[2:]
    cells = image_YX.reshape(WORDS_SIDE, _CELL, WORDS_SIDE, _CELL, *colours).swapaxes(1, 2)
    return cells.reshape(WORDS_SIDE**2, _CELL**2, *colours)


def _means(values_YX: NDArray[np.float32]) -> NDArray[np.float32]:
    means: NDArray[np.float32] = values_YX.reshape(WORDS_SIDE, _CELL, WORDS_SIDE, _CELL).mean((1, 3)).reshape(-1)
    return means
