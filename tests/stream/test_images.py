"""The images of a record, and their visual words."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from streamlearn.settings import StreamSettings
from streamlearn.stream.images import record_image, visual_words
from streamlearn.stream.record import ImageInputs
from tests.vision import make_image


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
