"""The bundled image-text backbone: complete, frozen, and able to name what it was trained on."""

from pathlib import Path

import pytest
import torch

from benchmarks.backbones.image_tasks import records
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone import nano_vl
from streamlearn.backbone.load import Backbone, load, outline
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.model_files import NANO_VL
from streamlearn.settings import AdapterSettings, BackboneSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from tests.vision import as_base64, make_image

IMAGES = Path(__file__).parents[3] / "shared/data/images"


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    settings = BackboneSettings(model="builtin:nano-vl", dtype="float32", device="cpu")
    return load(settings, outline(settings))


def decoder_of(backbone: Backbone) -> Decoder:
    return Decoder(backbone.tokenizer, StreamSettings(), backbone.vocab_size, (), backbone.vision, backbone.template)


def test_it_contains_the_language_model_unchanged(backbone: Backbone) -> None:
    """Every weight of nano is in it, and the vision weights are small."""
    plain = BackboneSettings(dtype="float32", device="cpu")
    language = load(plain, outline(plain)).model.state_dict()
    own = backbone.model.model.language_model.state_dict()
    assert all(
        torch.equal(own[name.removeprefix("model.")], w) for name, w in language.items() if name.startswith("model.")
    )
    assert torch.equal(backbone.model.lm_head.weight, language["model.embed_tokens.weight"])
    assert sum(file.stat().st_size for file in NANO_VL.iterdir()) < 8 << 20


def test_a_conversation_with_an_image_is_read(backbone: Backbone) -> None:
    """The image is 64 tokens in the user's turn."""
    decoder = decoder_of(backbone)
    turns = [{"role": "user", "content": "what is this?"}, {"role": "assistant", "content": "a dog"}]
    example = decoder.decode_value({"messages": turns, "image": as_base64(make_image())})
    assert (example.input_ids == nano_vl.IMAGE_TOKEN_ID).sum() == nano_vl.IMAGE_TOKENS
    assert decoder.text(example.input_ids[example.labels != -100].tolist()).strip() == "a dog"


def turn(role: str, content: str, *, image: bool = False, weight: int = 1) -> dict[str, object]:
    parts = [{"type": "image"}] * image + [{"type": "text", "text": content}]
    return {"role": role, "content": parts, **({} if weight else {"weight": weight})}


QUESTION, ANSWER = turn("user", "what colour?", image=True), turn("assistant", "red")
GREETING = [turn("user", "hello"), turn("assistant", "hi there")]


@pytest.mark.parametrize(
    ("record", "num_images", "kept"),
    [
        ({"messages": [*GREETING, turn("user", "and this?", image=True)]}, 1, 0),
        ({"messages": [*GREETING, turn("user", "<image> and this?")]}, 1, 0),
        ({"messages": [*GREETING, turn("user", "and this?", image=True), turn("assistant", "green", weight=0)]}, 1, 0),
        ({"prompt": GREETING[:1], "completion": [GREETING[1], turn("user", "and this?", image=True)]}, 1, 0),
        ({"messages": [QUESTION, ANSWER, turn("user", "and this?", image=True)]}, 2, 1),
        ({"messages": [QUESTION, ANSWER, turn("user", "<image>?"), turn("assistant", "green", weight=0)]}, 2, 1),
        ({"messages": [turn("user", "what colour?"), ANSWER, turn("user", "and this?")]}, 2, 2),
    ],
)
def test_an_image_after_the_last_answer_leaves_with_its_turn(
    backbone: Backbone, record: dict[str, object], num_images: int, kept: int
) -> None:
    """It is not shown to an earlier turn, and earlier images stay where they are; without places, all come first."""
    images = [make_image(number) for number in range(num_images)]
    example = decoder_of(backbone).decode_value({**record, "image": [as_base64(image) for image in images]})
    assert [image.data for image in example.images] == images[:kept]
    assert (example.input_ids == nano_vl.IMAGE_TOKEN_ID).sum() == kept * nano_vl.IMAGE_TOKENS


@pytest.mark.data
@pytest.mark.skipif(not IMAGES.is_dir(), reason="the shared images are not next to the repository")
def test_it_names_digits_it_was_taught(backbone: Backbone) -> None:
    """On test images. Its card states an accuracy of 0.88; chance is a seventh."""
    decoder = decoder_of(backbone)
    taught = [r for r in records(IMAGES, "digit", "test") if r["meta"]["answer"] in "0123456"][::5]
    model = attach(backbone.model, resolve(AdapterSettings()), 0)
    scores = run_to_end(score(model, [decoder.decode_value(r) for r in taught], torch.device("cpu"), pack_tokens=4096))
    assert sum(each.correct == each.tokens for each in scores) > 0.7 * len(taught)
