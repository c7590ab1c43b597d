"""The images of a record: decoding and its refusals, visual words, inputs that are computed again."""

import base64
import json
import struct
import subprocess
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from streamlearn.errors import Reason, RecordError
from streamlearn.settings import StreamSettings
from streamlearn.stream.images import (
    ImagePlaceholders,
    decode_base64,
    open_image,
    record_image,
    visual_words,
    with_image_parts,
)
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


def png(bits: int, color: int, pixels: bytes, transparent: bytes = b"") -> bytes:
    """A PNG of two pixels beside each other, also of the kinds that Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, bits, color, 0, 0, 0))
    key = chunk(b"tRNS", transparent) if transparent else b""
    data = chunk(b"IDAT", zlib.compress(b"\0" + pixels))
    return b"\x89PNG\r\n\x1a\n" + header + key + data + chunk(b"IEND", b"")


def pair(mode: str, left: object, right: object, kind: str = "PNG", **options: Any) -> bytes:
    image = Image.new(mode, (2, 1))
    image.putpixel((0, 0), left)  # type: ignore[arg-type]
    image.putpixel((1, 0), right)  # type: ignore[arg-type]
    return saved(image, kind, **options)


PALETTE = Image.new("P", (2, 1))
PALETTE.putpalette([0, 0, 0, 40, 50, 60])
PALETTE.putpixel((1, 0), 1)
WHITE = (255, 255, 255)


@pytest.mark.parametrize(
    ("data", "left", "right"),
    [
        (pair("RGBA", (0, 0, 0, 0), (40, 50, 60, 255)), WHITE, (40, 50, 60)),
        (pair("RGBA", (0, 0, 0, 51), (40, 50, 60, 255)), (204, 204, 204), (40, 50, 60)),
        (pair("RGBA", (0, 0, 0, 0), (40, 50, 60, 255), "WEBP", lossless=True, exact=True), WHITE, (40, 50, 60)),
        (pair("LA", (0, 0), (40, 255)), WHITE, (40, 40, 40)),
        (pair("1", 0, 1, transparency=0), WHITE, WHITE),
        (pair("L", 0, 40, transparency=0), WHITE, (40, 40, 40)),
        (pair("RGB", (1, 2, 3), (40, 50, 60), transparency=(1, 2, 3)), WHITE, (40, 50, 60)),
        (saved(PALETTE, "PNG", transparency=0), WHITE, (40, 50, 60)),
        (saved(PALETTE, "PNG", transparency=b"\x33\xff"), (204, 204, 204), (40, 50, 60)),
        (saved(PALETTE, "PNG"), (0, 0, 0), (40, 50, 60)),
        (png(2, 0, b"\x60", b"\0\1"), WHITE, (170, 170, 170)),
        (png(4, 0, b"\x12", b"\0\1"), WHITE, (34, 34, 34)),
        (png(16, 0, struct.pack(">2H", 0, 65535)), (0, 0, 0), WHITE),
        (png(16, 0, struct.pack(">2H", 10 * 257, 99 * 257)), (10, 10, 10), (99, 99, 99)),
        (png(16, 0, struct.pack(">2H", 1000, 2570), struct.pack(">H", 1000)), WHITE, (10, 10, 10)),
        (png(16, 2, struct.pack(">6H", *[9000] * 3, *[2570] * 3), struct.pack(">3H", *[9000] * 3)), WHITE, (10,) * 3),
        (png(16, 4, struct.pack(">4H", 0, 0, 2570, 65535)), WHITE, (10, 10, 10)),
    ],
)
def test_an_image_is_seen_as_on_a_white_page(data: bytes, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """With alpha in every way that a file has it, and gray of 16 bits scaled to 8."""
    image = open_image(data, "image", LIMITS)
    assert (image.mode, image.getpixel((0, 0)), image.getpixel((1, 0))) == ("RGB", left, right)


def test_of_a_camera_s_jpeg_the_first_picture_is_taken() -> None:
    """MPO: smaller pictures stand behind it."""
    small = Image.new("RGB", (8, 8), "blue")
    image = open_image(
        saved(Image.new("RGB", (32, 16), "red"), "MPO", save_all=True, append_images=[small]), "image", LIMITS
    )
    assert image.size == (32, 16)
    assert image.getpixel((0, 0)) == pytest.approx((255, 0, 0), abs=2)


def test_a_photo_is_turned_upright() -> None:
    """The camera's rotation flag is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    assert open_image(saved(Image.new("RGB", (30, 20)), "JPEG", exif=exif), "image", LIMITS).size == (20, 30)


@pytest.mark.parametrize(
    ("data", "reason", "message"),
    [
        (b"", Reason.BAD_IMAGE, "must be JPEG, PNG or WebP"),
        (b"GI", Reason.BAD_IMAGE, "found bytes 47 49"),
        (saved(Image.new("RGB", (8, 8)), "GIF"), Reason.BAD_IMAGE, "must be JPEG, PNG or WebP, found GIF"),
        (saved(Image.new("RGB", (8, 8)), "TIFF"), Reason.BAD_IMAGE, "found TIFF"),
        (b"\0\0\0\x20ftypheic", Reason.BAD_IMAGE, "found HEIC"),
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
    with pytest.raises(RecordError, match="one still image, found an animation of 2 frames"):
        open_image(data, "image", LIMITS)


DATA = make_image()
BASE64 = as_base64(DATA)
URL_SAFE = base64.urlsafe_b64encode(b"\xfb\xff\xfe\xff").decode()


@pytest.mark.parametrize(
    ("text", "data"),
    [
        (BASE64, DATA),
        (f"{BASE64}\n", DATA),
        (base64.encodebytes(DATA).decode(), DATA),
        (base64.encodebytes(DATA).decode().replace("\n", "\r\n"), DATA),
        (f" {BASE64[:8]} \t{BASE64[8:]}", DATA),
        (f"data:image/png;base64,{BASE64}", DATA),
        (f"data:image/png;base64,\n{base64.encodebytes(DATA).decode()}", DATA),
        (f"data:image/png;name=a.png;charset=utf-8;base64,{BASE64}", DATA),
        (f"DATA:;Base64,{BASE64}", DATA),
        (f"data:image/png;base64,{quote(BASE64, safe='')}", DATA),
        (URL_SAFE, b"\xfb\xff\xfe\xff"),
        (URL_SAFE.rstrip("="), b"\xfb\xff\xfe\xff"),
    ],
)
def test_base64_is_read_as_encoders_write_it(text: str, data: bytes) -> None:
    """In lines, in a data: URL, and in the alphabet for URLs."""
    assert decode_base64(text, "image") == data


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (None, "image must be a base64 string, found null"),
        ({"bytes": "x"}, "image must be a base64 string, found an object"),
        (BASE64[:-1], "image must be base64: Incorrect padding"),
        ("images/1.png", "must be base64: .*; paths are never read"),
        ("data:image/png,%89PNG", "must be base64 also in a data: URL"),
        ("data:image/svg+xml;utf8,<svg/>", r"found 'data:image/svg\+xml;utf8,'"),
        ("data:image/png;base64", "must be base64 also in a data: URL"),
        ("data:image/png;base64,!", "must be base64: "),
        ("https://example.org/a.png", "found 'https://exam'; images are never downloaded"),
        ("s3://bucket/a.png", "images are never downloaded"),
    ],
)
def test_what_is_not_base64_is_refused(item: object, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode_base64(item, "image")


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


IMAGE = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("contents", "num_images", "expected"),
    [
        (["why?"], 0, ["why?"]),
        (["<image>?"], 0, ["<image>?"]),
        (["why?"], 2, [[IMAGE, IMAGE, text("why?")]]),
        ([""], 1, [[IMAGE]]),
        (["First <image> then <image>?"], 2, [[text("First "), IMAGE, text(" then "), IMAGE, text("?")]]),
        (["<image>\na", "b", "c<image>"], 2, [[IMAGE, text("\na")], "b", [text("c"), IMAGE]]),
        (["a", "write <image>"], 1, [[IMAGE, text("a")], "write <image>"]),
        ([[text("<image> or "), text("this?")]], 1, [[IMAGE, text(" or "), text("this?")]]),
        ([[IMAGE, text("a")], "b", "<image>"], 2, [[IMAGE, text("a")], "b", [IMAGE]]),
        ([[text("a"), IMAGE]], 1, [[text("a"), IMAGE]]),
        ([None, "a", "b"], 1, [[IMAGE], "a", "b"]),
        (["<image>"], 2, "once for each of 2 images or not at all, found 1"),
        (["<image><image>"], 1, "once for each of 1 images or not at all, found 2"),
        ([[IMAGE, text("<image>")]], 1, "found 2"),
    ],
)
def test_images_take_their_places_in_messages(contents: list[Any], num_images: int, expected: object) -> None:
    """As in prompts; an assistant's turn keeps the mark as text."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    image = record_image(DATA, CountingProcessor(), LIMITS)
    if isinstance(expected, str):
        with pytest.raises(RecordError, match=expected):
            with_image_parts(messages, [image] * num_images)
    else:
        assert [message["content"] for message in with_image_parts(messages, [image] * num_images)] == expected


def test_null_and_an_empty_list_are_no_images() -> None:
    """For a backbone that reads only text, too."""
    absent: list[object] = [None, []]
    for vision in (None, CountingProcessor()):
        for nothing in absent:
            assert ImagePlaceholders(vision, LIMITS).images({"image": nothing}) == ()
    with pytest.raises(RecordError, match=r"image\[1\] must be a base64 string, found null"):
        ImagePlaceholders(CountingProcessor(), LIMITS).images({"image": [BASE64, None]})
