"""Image decoding, and its refusals."""

import json
import subprocess
import sys
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from benchmarks.image_damage import MUTATIONS
from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.images import decode_base64, open_image
from tests.vision import as_base64, make_image

LIMITS = StreamSettings()


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_valid_images_become_rgb(kind: str, mode: str) -> None:
    """Their size does not change."""
    image = open_image(saved(Image.new(mode, (30, 20)), kind), "image", LIMITS)
    assert (image.mode, image.size) == ("RGB", (30, 20))


def test_transparent_and_palette_images_become_rgb() -> None:
    """In every mode that PNG supports."""
    for mode in ("RGBA", "P", "LA", "1", "I;16"):
        assert open_image(saved(Image.new(mode, (8, 8)), "PNG"), "image", LIMITS).mode == "RGB"


def test_a_photo_is_turned_upright() -> None:
    """The camera's rotation flag is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    assert open_image(saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif), "image", LIMITS).size == (20, 30)


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", Reason.BAD_IMAGE, "must be JPEG, PNG or WebP"),
        (b"GIF89a", Reason.BAD_IMAGE, "found bytes 47 49 46 38 39 61"),
        (make_image()[:60], Reason.BAD_IMAGE, "cannot be decoded as PNG"),
        (make_image(kind="JPEG")[:200], Reason.BAD_IMAGE, "cannot be decoded as JPEG"),
        (make_image(kind="WEBP")[:60], Reason.BAD_IMAGE, "cannot be decoded as WEBP"),
        (saved(Image.new("1", (5000, 5000)), "PNG"), Reason.TOO_LARGE, "found 5000 x 5000"),
    ],
)
def test_other_bytes_are_refused(data: bytes, reason: Reason, message: str) -> None:
    """The message states what was found."""
    with pytest.raises(RecordError, match=message) as caught:
        open_image(data, "image", LIMITS)
    assert caught.value.reason is reason


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused(kind: str) -> None:
    """An image must have exactly one frame."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
    with pytest.raises(RecordError, match="one still image, found 2 frames"):
        open_image(data, "image", LIMITS)


def test_base64_must_be_complete() -> None:
    """Line breaks, a missing end and data URLs are refused."""
    whole = as_base64(make_image())
    assert decode_base64(whole, "image") == make_image()
    for broken in (whole[:-1], f"{whole[:8]}\n{whole[8:]}", f"data:image/png;base64,{whole}", None):
        with pytest.raises(RecordError):
            decode_base64(broken, "image")


def test_every_mutation_ends_in_an_image_or_a_reason() -> None:
    """The only error is RecordError. In a process of its own: what earlier tests left in memory is not measured."""
    command = [sys.executable, "-m", "benchmarks.fuzz_images", "--seed", "1"]
    result = json.loads(subprocess.check_output([*command, "--count", f"{30 * len(MUTATIONS)}"]))
    assert result["unaccounted"] == 0
    assert set(result["outcomes"]) <= {"decoded", "bad_image", "too_large"}
    assert result["outcomes"]["bad_image"] > 100
    assert result["peak_memory_growth_mib"] < 256
