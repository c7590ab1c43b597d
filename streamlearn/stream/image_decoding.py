"""From the bytes in a record to an image that can be looked at, or to a RecordError; never to anything else.

An image is base64 in the record itself: no address, no path. What can go wrong is refused before it costs anything, in
this order: not base64, no known format by its first bytes (JPEG, PNG, WebP), more pixels than allowed by the header,
more than one frame, damaged data. Pillow 12.2 and later: before it, a gzipped FITS file could fill the memory.
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

FORMATS = ("JPEG", "PNG", "WEBP")
_BEGINNINGS: Mapping[str, bytes] = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}

# For good and for all: a switch back and forth would be every thread's.
warnings.filterwarnings("error", category=Image.DecompressionBombWarning)
assert not ImageFile.LOAD_TRUNCATED_IMAGES, "something in this process asked Pillow to accept damaged images"


def decode_base64(item: object, where: str) -> bytes:
    """The bytes that a base64 string stands for.

    Raises:
        RecordError: it is not one.
    """
    if not isinstance(item, str):
        raise RecordError(Reason.BAD_TYPE, f"{where} must be a base64 string, found {json_type(item)}")
    if item.startswith(("data:", "http:", "https:", "file:")):
        raise RecordError(
            Reason.BAD_IMAGE,
            f"{where} must be the image's bytes in base64 and nothing before them, found {item[:12]!r}; "
            "images are never fetched",
        )
    try:
        return base64.b64decode(item, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be base64: {error}") from None


def open_image(data: bytes, where: str, limits: StreamSettings) -> Image.Image:
    """The image in these bytes, upright, RGB.

    Raises:
        RecordError: it is none that can be used.
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
            Reason.TOO_LARGE, f"{where} may have {limits.max_image_pixels} pixels (max_image_pixels): {error}"
        ) from None
    except Exception as error:  # noqa: BLE001 - a dozen decoders raise what they like; all of it means: not usable
        said = " ".join(str(error).split())[:160]
        raise RecordError(
            Reason.BAD_IMAGE, f"{where} cannot be decoded as {kind}: {said or type(error).__name__}"
        ) from None


def _check(image: Image.Image, where: str, limits: StreamSettings) -> None:
    """What the header alone tells; nothing is decoded yet."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{where} may have {limits.max_image_pixels} pixels (max_image_pixels), found {width} x {height}",
        )
    frames = getattr(image, "n_frames", 1)
    if frames != 1:
        raise RecordError(Reason.BAD_IMAGE, f"{where} must be one still image, found {frames} frames")
