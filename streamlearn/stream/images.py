"""The images of a record.

A `RecordImage` keeps the bytes of the record and computes the model's inputs from them on demand, once. An example that
is kept for later drops these inputs, which are a hundred times larger than the bytes, and computes them again when they
are needed. They are a function of the bytes and the backbone, so they are the same each time.
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

# Shape suffixes: Y rows of pixels, X columns of pixels, C colours, N cells of the grid.

_GRID_SIDE = 4  # cells per side of the grid that visual words are computed on
_CELL = 8  # pixels per side of a cell
_LEVELS = 4  # of each colour
_SIDE = _GRID_SIDE * _CELL
_WHITE, _WHITE_GREY = 256, 3 * 256  # above the largest value of a colour, and of the sum of three
_BASE = np.array([1, _LEVELS, _LEVELS**2])  # combines the levels of a cell's three colours into one number
_SALT = 7919


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """What a backbone's processor computes from one image."""

    token_ids: tuple[int, ...]
    """The tokens that replace the image's placeholder."""
    features: Mapping[str, NDArray[np.generic]]
    """Keyword arguments of the forward pass."""


class VisionProcessor(Protocol):
    """A backbone's processor of images."""

    placeholder: tuple[int, ...]
    """Token ids inserted into a prompt for one image; one of them is `image_token`."""
    image_token: int
    """Token id that is replaced by `ImageInputs.token_ids`."""
    axes: Mapping[str, int]
    """The axis along which each feature of several images is concatenated."""

    def inputs(self, image: Image.Image) -> ImageInputs:
        """Compute the model's inputs of one RGB image."""

    def positions(self, input_ids: NDArray[np.int32], inputs: Sequence[ImageInputs]) -> NDArray[np.int64] | None:
        """Return the positions (P, T) of a record's tokens; None if they are 0, 1, 2, ..."""


class RecordImage:
    """One image of a record. The constructor raises RecordError if the bytes are not a usable image."""

    def __init__(self, data: bytes, vision: VisionProcessor, limits: StreamSettings, where: str = "image") -> None:
        self.data = data
        self._vision, self._limits = vision, limits
        image = open_image(data, where, limits)
        self.visual_words = visual_words(image)
        """A coarse description of the image as a few integers, for shift detection."""
        self._inputs: ImageInputs | None = vision.inputs(image)

    @classmethod
    def from_base64(cls, text: object, where: str, vision: VisionProcessor, limits: StreamSettings) -> "RecordImage":
        """Decode an image as a record holds it."""
        return cls(decode_base64(text, where), vision, limits, where)

    @property
    def extent(self) -> int:
        """Length of the pixel values along the axis of concatenation: images, tiles or patches."""
        return int(self.inputs.features["pixel_values"].shape[self.axes["pixel_values"]])

    @property
    def inputs(self) -> ImageInputs:
        """The model's inputs, computed again after `drop_inputs`."""
        if self._inputs is None:
            self._inputs = self._vision.inputs(open_image(self.data, "image", self._limits))
        return self._inputs

    @property
    def axes(self) -> Mapping[str, int]:
        """See `VisionProcessor.axes`."""
        return self._vision.axes

    def drop_inputs(self) -> None:
        """Keep only the bytes until the inputs are needed again."""
        self._inputs = None


def visual_words(image: Image.Image) -> NDArray[np.int32]:
    """Return integers that are equal for similar images: colours, contrasts and edges of the cells of a 4 x 4 grid.

    Each value occurs once, regardless of its place and count. An image has about ten visual words, no more than a
    question has words, so that neither outweighs the other in shift detection.
    """
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=1.0)
    red_YX, green_YX, blue_YX = rgb_CYX = np.moveaxis(np.asarray(small, dtype=np.float64), 2, 0)
    grey_YX = red_YX + green_YX + blue_YX
    down_YX, right_YX = np.zeros_like(grey_YX), np.zeros_like(grey_YX)
    np.abs(grey_YX[1:] - grey_YX[:-1], out=down_YX[:-1])
    np.abs(grey_YX[:, 1:] - grey_YX[:, :-1], out=right_YX[:, :-1])
    pixels = np.stack([*rgb_CYX, grey_YX, grey_YX**2, down_YX + right_YX, down_YX - right_YX])
    means = pixels.reshape(len(pixels), -1) @ _CELL_MEANS
    colour_CN, (grey_N, square_N, edges_N, edge_direction_N) = means[:3], means[3:]
    contrast_N = np.sqrt(np.maximum(square_N - grey_N**2, 0.0))
    kinds = [
        _BASE @ np.floor(colour_CN * (_LEVELS / _WHITE)),
        np.floor(np.minimum(contrast_N * (8 / _WHITE_GREY), 3)),
        np.floor(np.minimum(edges_N * (32 / _WHITE_GREY), 3)),
        np.sign(np.round(edge_direction_N * (32 / _WHITE_GREY))) + 1,
    ]
    width, height = image.size
    values = [number * 101 + int(level) + 1 for number, kind in enumerate(kinds) for level in sorted({*kind.tolist()})]
    values += [round(2 * math.log2(width / height)) + 512, round(math.log2(width * height)) + 2048]
    return np.array([value * _SALT & 0x7FFFFFFF for value in values], dtype=np.int32)


def _cell_means() -> NDArray[np.float64]:
    """The matrix (pixels, cells) that takes the mean of each cell; sums of whole numbers are exact."""
    cell_Y = np.arange(_SIDE) // _CELL
    cell_YX = cell_Y[:, None] * _GRID_SIDE + cell_Y
    means: NDArray[np.float64] = (cell_YX.reshape(-1, 1) == np.arange(_GRID_SIDE**2)) / _CELL**2
    return means


_CELL_MEANS = _cell_means()
