"""The images of a record: decoded as a viewer shows them, and their places in prompts and messages.

A `RecordImage` keeps the bytes of the record and computes the model's inputs from them on demand, once. An example that
is kept for later drops these inputs, which are a hundred times larger than the bytes, and computes them again when they
are needed. They are a function of the bytes and the backbone, so they are the same each time.
"""

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.encode import Encoder
from streamlearn.stream.parse import json_type
from streamlearn.stream.record import IGNORED, ImageInputs, RecordImage
from streamlearn.stream.template import Message

_BEGINNINGS: Mapping[str, bytes] = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}
_OTHERS: Mapping[str, re.Pattern[bytes]] = {
    "GIF": re.compile(rb"GIF8"),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "JPEG 2000": re.compile(rb"\0\0\0\x0cjP"),
    "AVIF": re.compile(rb".{4}ftypavi", re.DOTALL),
    "HEIC": re.compile(rb".{4}ftyp(hei|hev|mif)", re.DOTALL),
    "PDF": re.compile(rb"%PDF"),
    "SVG": re.compile(rb"\s*<(svg|\?xml)"),
}
"""Beginnings of formats that are refused by name."""

assert not ImageFile.LOAD_TRUNCATED_IMAGES, "other code in this process made Pillow accept damaged images"


_DATA_URL = re.compile(r"\s*data:[^,]*,?", re.IGNORECASE)
_ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_URL_SAFE = str.maketrans("-_", "+/")


def decode_base64(item: object, where: str) -> bytes:
    """Decode base64, also in lines, in the alphabet for URLs (padding is optional there), or in a `data:` URL.

    Raises:
        RecordError: `item` is not such a string.
    """
    if not isinstance(item, str):
        raise RecordError(Reason.BAD_TYPE, f"{where} must be a base64 string, found {json_type(item)}")
    try:
        return base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError):
        text = _content_of_url(item, where)
    text = "".join(text.split())
    if "-" in text or "_" in text:
        text = text.translate(_URL_SAFE) + "=" * (-len(text) % 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be base64: {error}; paths are never read") from None


def _content_of_url(text: str, where: str) -> str:
    """Return what follows the head of a `data:` URL; other text as it stands."""
    if head := _DATA_URL.match(text):
        if not re.search(r";\s*base64\s*,$", head[0], re.IGNORECASE):
            raise RecordError(
                Reason.BAD_IMAGE,
                f"{where} must be base64 also in a data: URL (data:image/png;base64,...), found "
                f"{head[0].strip()[:40]!r}",
            )
        return unquote_to_bytes(text[head.end() :]).decode("latin-1")
    if _ADDRESS.match(text):
        raise RecordError(
            Reason.BAD_IMAGE,
            f"{where} must hold the image's bytes in base64, found {text.strip()[:12]!r}; images are never downloaded",
        )
    return text


def open_image(data: bytes, where: str, limits: StreamSettings) -> Image.Image:
    """Decode an image to RGB as a viewer shows it: turned upright, on a white page, with 16 bits of gray scaled to 8.

    Bad images are refused as cheaply as possible: by their first bytes, then by the pixels in the header, then by the
    number of frames, then as damaged data. This requires Pillow 12.2: in earlier releases a gzipped FITS file could
    exhaust the memory.

    Raises:
        RecordError: the bytes are not a usable image.
    """
    kind = next((name for name, beginning in _BEGINNINGS.items() if data.startswith(beginning)), None)
    if kind is None:
        other = next((name for name, beginning in _OTHERS.items() if beginning.match(data)), None)
        found = other or f"bytes {data[:8].hex(' ')}"
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be JPEG, PNG or WebP, found {found}")
    try:
        with Image.open(BytesIO(data), formats=(kind,)) as image:
            _check(image, where, limits)
            rawmode = image.tile[0].args if image.tile else None
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image if _is_plain(image) else _as_shown(image, rawmode, where)
    except RecordError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise RecordError(
            Reason.TOO_LARGE, f"{where} may have at most {limits.max_image_pixels} pixels (max_image_pixels): {error}"
        ) from None
    except Exception as error:  # noqa: BLE001 - decoders raise errors of any type; each means: not usable
        text = " ".join(str(error).split())[:160]
        raise RecordError(
            Reason.BAD_IMAGE, f"{where} cannot be decoded as {kind}: {text or type(error).__name__}"
        ) from None


def _is_plain(image: Image.Image) -> bool:
    return image.mode == "RGB" and "transparency" not in image.info


_KEY_OF_RAW: Mapping[object, Callable[[int], int]] = {
    "L;2": lambda key: key * 85,
    "L;4": lambda key: key * 17,
    "RGB;16B": lambda key: key >> 8,
}
"""Pillow's name of the pixels in a PNG -> how it decodes them, for the transparent color, which it leaves as it is."""


def _as_shown(image: Image.Image, rawmode: object, where: str) -> Image.Image:
    """Return an image of any mode as RGB on a white page."""
    if image.mode.startswith("I"):
        return _gray_of_16_bits(image, where)
    if image.mode == "F":
        raise RecordError(Reason.BAD_IMAGE, f"{where} must have levels of 8 or 16 bits, found fractions (mode F)")
    if not image.has_transparency_data:
        return image.convert("RGB")
    key = image.info.get("transparency")
    if rawmode in _KEY_OF_RAW and key is not None:
        scaled = _KEY_OF_RAW[rawmode]
        image.info["transparency"] = tuple(map(scaled, key)) if isinstance(key, tuple) else scaled(key)
    if image.mode in ("La", "RGBa"):  # premultiplied
        image = image.convert(image.mode.upper())
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _gray_of_16_bits(image: Image.Image, where: str) -> Image.Image:
    """Scale 0..65535 to 0..255; a transparent level becomes white."""
    levels_YX = np.asarray(image).astype(np.int64)
    if levels_YX.size and not 0 <= levels_YX.min() <= levels_YX.max() < 1 << 16:
        raise RecordError(
            Reason.BAD_IMAGE, f"{where} must have levels of 8 or 16 bits, found {levels_YX.min()} to {levels_YX.max()}"
        )
    gray_YX = ((levels_YX + 128) // 257).astype(np.uint8)
    gray_YX[levels_YX == image.info.get("transparency", -1)] = 255
    return Image.fromarray(gray_YX).convert("RGB")


def _check(image: Image.Image, where: str, limits: StreamSettings) -> None:
    """Check the header before anything is decoded."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{where} may have at most {limits.max_image_pixels} pixels (max_image_pixels), found {width} x {height}",
        )
    frames = getattr(image, "n_frames", 1)
    if frames != 1 and image.format != "MPO":  # a camera's JPEG, with previews behind its first picture
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be one still image, found an animation of {frames} frames")


# Shape suffixes: Y rows of pixels, X columns of pixels, C colors, N cells of the grid.

_GRID_SIDE = 4  # cells per side of the grid that visual words are computed on
_CELL = 8  # pixels per side of a cell
_LEVELS = 4  # of each color
_SIDE = _GRID_SIDE * _CELL
_WHITE, _WHITE_GRAY = 256, 3 * 256  # above the largest value of a color, and of the sum of three
_BASE = np.array([1, _LEVELS, _LEVELS**2])  # combines the levels of a cell's three colors into one number
_SALT = 7919


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


def record_image(data: bytes, vision: VisionProcessor, limits: StreamSettings, where: str = "image") -> RecordImage:
    """Decode an image of a record. Raises RecordError if the bytes are not a usable image."""
    image = open_image(data, where, limits)
    words, inputs = visual_words(image), vision.inputs(image)
    return RecordImage(data, words, vision.axes, inputs, lambda: vision.inputs(open_image(data, "image", limits)))


def visual_words(image: Image.Image) -> NDArray[np.int32]:
    """Return integers that are equal for similar images: colors, contrasts and edges of the cells of a 4 x 4 grid.

    Each value occurs once, regardless of its place and count. An image has about ten visual words, no more than a
    question has words, so that neither outweighs the other in shift detection.
    """
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=1.0)
    red_YX, green_YX, blue_YX = rgb_CYX = np.moveaxis(np.asarray(small, dtype=np.float64), 2, 0)
    gray_YX = red_YX + green_YX + blue_YX
    down_YX, right_YX = np.zeros_like(gray_YX), np.zeros_like(gray_YX)
    np.abs(gray_YX[1:] - gray_YX[:-1], out=down_YX[:-1])
    np.abs(gray_YX[:, 1:] - gray_YX[:, :-1], out=right_YX[:, :-1])
    pixels = np.stack([*rgb_CYX, gray_YX, gray_YX**2, down_YX + right_YX, down_YX - right_YX])
    means = pixels.reshape(len(pixels), -1) @ _CELL_MEANS
    color_CN, (gray_N, square_N, edges_N, edge_direction_N) = means[:3], means[3:]
    contrast_N = np.sqrt(np.maximum(square_N - gray_N**2, 0.0))
    kinds = [
        _BASE @ np.floor(color_CN * (_LEVELS / _WHITE)),
        np.floor(np.minimum(contrast_N * (8 / _WHITE_GRAY), 3)),
        np.floor(np.minimum(edges_N * (32 / _WHITE_GRAY), 3)),
        np.sign(np.round(edge_direction_N * (32 / _WHITE_GRAY))) + 1,
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


IMAGE_MARK = "<image>"


def has_images(value: Mapping[str, Any]) -> bool:
    """Whether a record comes with images: null and an empty list are none."""
    return value.get("image") not in (None, [])


class ImagePlaceholders:
    """The image handling of a decoder; without `vision`, records with images are refused.

    A record's text is encoded with one placeholder per image. The image token in each placeholder is then replaced by
    the tokens that the backbone's processor computes for that image.
    """

    def __init__(self, vision: VisionProcessor | None, limits: StreamSettings) -> None:
        self.vision = vision
        self._limits = limits

    @property
    def margins(self) -> tuple[int, int]:
        """Tokens of a placeholder before and after its image token."""
        if self.vision is None:
            return 0, 0
        before = self.vision.placeholder.index(self.vision.image_token)
        return before, len(self.vision.placeholder) - 1 - before

    def images(self, value: Mapping[str, Any]) -> tuple[RecordImage, ...]:
        """Decode the images of a record.

        Raises:
            RecordError: one of them cannot be used.
        """
        if not has_images(value):
            return ()
        if self.vision is None:
            raise RecordError(Reason.BAD_FORM, "image: this backbone reads only text")
        is_list = isinstance(value["image"], list)
        items = value["image"] if is_list else [value["image"]]
        limit = self._limits.max_images
        if len(items) > limit:
            raise RecordError(
                Reason.TOO_LARGE, f"image may hold at most {limit} images (max_images), found {len(items)}"
            )
        places = [f"image[{i}]" for i in range(len(items))] if is_list else ["image"]
        return tuple(
            record_image(decode_base64(item, where), self.vision, self._limits, where)
            for item, where in zip(items, places, strict=True)
        )

    def encode_prompt(self, encoder: Encoder, prompt: str, images: Sequence[RecordImage]) -> list[int]:
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
        """Return the positions (P, T) of a record's tokens; None if they are 0, 1, 2, ..."""
        if self.vision is None:
            return None
        return self.vision.positions(ids, [image.inputs for image in images])


def with_image_parts(messages: Sequence[Message], images: Sequence[RecordImage]) -> list[Message]:
    """Return the messages with a part at the place of every image.

    Places are parts of type image in any message, and the mark `<image>` outside of assistant turns, where it is text
    to learn. Without a place the images come first in the first user message.

    Raises:
        RecordError: there are places, but not one for each image.
    """
    if not images:
        return list(messages)
    placed = [
        message if message["role"] == "assistant" else {**message, "content": _split_at_marks(message.get("content"))}
        for message in messages
    ]
    found = count_image_parts(placed)
    if found == len(images):
        return placed
    if found:
        raise RecordError(
            Reason.BAD_FORM,
            f"messages must contain {IMAGE_MARK} or a part of type image once for each of {len(images)} images or not "
            f"at all, found {found}",
        )
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), 0)
    content = messages[at].get("content") or []
    texts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*messages[:at], {**messages[at], "content": [{"type": "image"}] * len(images) + texts}, *messages[at + 1 :]]


def count_image_parts(messages: Sequence[Message]) -> int:
    """Return the number of places that images have in the messages."""
    contents = [message.get("content") for message in messages]
    return sum(part["type"] == "image" for content in contents if isinstance(content, list) for part in content)


def _split_at_marks(content: Any) -> Any:
    """Return the content with every mark as a part; as it stands without any."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not any(IMAGE_MARK in part.get("text", "") for part in parts):
        return content
    split: list[dict[str, str]] = []
    for part in parts:
        for number, text in enumerate(part.get("text", "").split(IMAGE_MARK)):
            split += [{"type": "image"}] if number else []
            split += [{**part, "text": text}] if text else []
        split += [part] if "text" not in part else []
    return split
