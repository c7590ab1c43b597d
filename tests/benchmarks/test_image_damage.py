"""Damage to image files."""

import random
import struct
import zlib
from io import BytesIO

import pytest
from PIL import Image

from benchmarks import image_damage
from benchmarks.image_damage import MUTATIONS, Mutation
from tests.vision import make_image


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_seed_determines_the_damage(mutation: Mutation) -> None:
    """The original is not changed."""
    data = make_image()
    one, two = (mutation(data, random.Random(3)) for _ in range(2))
    assert one == two
    assert data == make_image()


def test_a_changed_header_has_a_valid_checksum() -> None:
    """Else the size would never be read."""
    found = image_damage.header(make_image(), random.Random(0))
    body, (checksum,) = found[12:29], struct.unpack(">I", found[29:33])
    assert body.startswith(b"IHDR")
    assert zlib.crc32(body) == checksum


def test_an_animation_has_two_frames() -> None:
    """In PNG and in WebP."""
    kinds = set()
    for seed in range(8):
        image = Image.open(BytesIO(image_damage.animated(b"", random.Random(seed))))
        kinds.add(image.format)
        assert getattr(image, "n_frames", 1) == 2
    assert kinds == {"PNG", "WEBP"}
