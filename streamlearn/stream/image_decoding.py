"""Decoding of an image from the bytes in a record; the only error is a RecordError.

The image is base64 in the record itself: URLs and paths are refused. Bad images are refused as cheaply as possible, in
this order:

1. not base64;
2. the first bytes are not those of JPEG, PNG or WebP;
3. the header states more pixels than allowed;
4. more than one frame;
5. damaged data.

This requires Pillow 12.2 or later: in earlier releases a gzipped FITS file could exhaust the memory.
"""

import base64
import binascii
import warnings
from collections.abc import Mapping
from io import BytesIO

from PIL import Image, ImageFile, ImageOps

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.parse import json_type

_BEGINNINGS: Mapping[str, bytes] = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}

# Set once and for the whole process: filters are shared by all threads and must not be switched back and forth.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
assert not ImageFile.LOAD_TRUNCATED_IMAGES, "other code in this process made Pillow accept damaged images"


def decode_base64(item: object, where: str) -> bytes:
    """Decode a base64 string.

    Raises:
        RecordError: `item` is not a base64 string.
    """
    if not isinstance(item, str):
        raise RecordError(Reason.BAD_TYPE, f"{where} must be a base64 string, found {json_type(item)}")
    if item.startswith(("data:", "http:", "https:", "file:")):
        raise RecordError(
            Reason.BAD_IMAGE,
            f"{where} must hold only the image's bytes in base64, found {item[:12]!r}; images are never downloaded",
        )
    try:
        return base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be base64: {error}") from None


def open_image(data: bytes, where: str, limits: StreamSettings) -> Image.Image:
    """Decode an image to RGB, turned upright.

    Raises:
        RecordError: the bytes are not a usable image.
    """
    kind = next((name for name, beginning in _BEGINNINGS.items() if data.startswith(beginning)), None)
    if kind is None:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be JPEG, PNG or WebP, found bytes {data[:8].hex(' ')}")
    try:
        with Image.open(BytesIO(data), formats=(kind,)) as image:
            _check(image, where, limits)
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return image if image.mode == "RGB" else image.convert("RGB")
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


def _check(image: Image.Image, where: str, limits: StreamSettings) -> None:
    """Check the header before anything is decoded."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{where} may have at most {limits.max_image_pixels} pixels (max_image_pixels), found {width} x {height}",
        )
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be one still image, found {frames} frames")
