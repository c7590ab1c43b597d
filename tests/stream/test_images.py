"""The images of a record: decoding and its refusals, visual words, inputs that are computed again."""

import json
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.images import decode_base64, open_image, record_image, visual_words
from streamlearn.stream.record import ImageInputs
from tests.fuzz.image_damage import MUTATIONS
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
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
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
    command = [sys.executable, "-m", "tests.fuzz.images", "--seed", "1"]
    result = json.loads(subprocess.check_output([*command, "--count", f"{15 * len(MUTATIONS)}"]))
    assert result["unaccounted"] == 0
    assert set(result["outcomes"]) <= {"decoded", "bad_image", "too_large"}
    assert result["outcomes"]["bad_image"] > 50
    assert result["peak_memory_growth_mib"] < 256


def test_importing_the_decoder_changes_no_warning_filter() -> None:
    """A program that imports `streamlearn.stream` keeps its own rules for Pillow's warnings."""
    code = "import warnings, streamlearn.stream.images; print([str(rule) for rule in warnings.filters])"
    assert "DecompressionBomb" not in subprocess.check_output([sys.executable, "-c", code], text=True)


def test_a_size_that_pillow_warns_of_is_refused_as_too_large() -> None:
    """Whatever becomes of the warning: 10,000 x 10,000 pixels lie between Pillow's limit and its double."""
    data = saved(Image.new("1", (10_000, 10_000)), "PNG")
    for action in ("error", "ignore"):
        with warnings.catch_warnings():
            warnings.simplefilter(action, Image.DecompressionBombWarning)
            with pytest.raises(RecordError) as caught:
                open_image(data, "image", LIMITS)
        assert caught.value.reason is Reason.TOO_LARGE


def test_similar_images_have_the_same_visual_words() -> None:
    """Noise changes few of them; another image has different ones."""
    rng = np.random.default_rng(0)
    pixels = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    noisy = np.clip(pixels + rng.normal(0, 3, pixels.shape), 0, 255).astype(np.uint8)
    other = np.kron(rng.integers(0, 256, (4, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    own, similar, different = (set(visual_words(Image.fromarray(each)).tolist()) for each in (pixels, noisy, other))
    assert len(own & similar) > 0.85 * len(own)
    assert len(own & different) < 0.65 * len(own)  # contrast and edges have few levels, which all images share
    assert min(own) >= 0


class CountingProcessor:
    """A vision processor that counts its calls."""

    placeholder: tuple[int, ...] = (7,)
    image_token = 7
    axes: Mapping[str, int] = {"pixel_values": 0}

    def __init__(self) -> None:
        self.calls = 0

    def inputs(self, image: Image.Image) -> ImageInputs:
        self.calls += 1
        return ImageInputs((7, 8), {"pixel_values": np.zeros((3, image.width))})

    def positions(self, input_ids: NDArray[np.int32], inputs: Sequence[ImageInputs]) -> None:
        return None


def test_inputs_are_computed_once_and_again_after_they_were_dropped() -> None:
    """The bytes and the visual words are kept."""
    vision = CountingProcessor()
    image = record_image(make_image(), vision, StreamSettings())
    assert image.inputs is image.inputs
    assert (vision.calls, image.extent) == (1, 3)
    image.drop_inputs()
    assert image.inputs.token_ids == (7, 8)
    assert vision.calls == 2
    assert image.data == make_image()
