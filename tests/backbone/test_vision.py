"""Image-text backbones: decoding, packing, training and generation for every family."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from streamlearn.adapters.context import NO_REGIME
from streamlearn.adapters.presets import resolve
from streamlearn.adapters.tuner import attach
from streamlearn.backbone.load import Backbone, load, load_preprocessing, outline
from streamlearn.errors import Reason, RecordError
from streamlearn.learner.evaluate import prompt_of, run_to_end, score
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.settings import AdapterSettings, BackboneSettings, LearnerSettings, StreamSettings
from streamlearn.stream.decode import Decoder
from streamlearn.stream.record import Example
from tests.vision import FAMILIES, as_base64, make_image, tiny_vision_backbone

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_backbone(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def backbone(folder: Path) -> Backbone:
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    return load(settings, outline(settings))


def decoder_of(backbone: Backbone, **limits: Any) -> Decoder:
    return Decoder(
        backbone.tokenizer, StreamSettings(**limits), backbone.vocab_size, (), backbone.vision, backbone.template
    )


def examples_of(decoder: Decoder) -> list[Example]:
    """One image, no image, two images of different sizes and formats, and a conversation."""
    return [
        decoder.decode_value({"prompt": "what is it?", "completion": " a dog", "image": as_base64(make_image(1))}),
        decoder.decode_value({"prompt": "hello world", "completion": " test"}),
        decoder.decode_value(
            {
                "prompt": "see <image> and <image> again",
                "completion": " fox",
                "image": [as_base64(make_image(2)), as_base64(make_image(3, (60, 30), "JPEG"))],
            }
        ),
        decoder.decode_value(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "image"}]},
                    {"role": "assistant", "content": "a fox"},
                ],
                "image": as_base64(make_image(4)),
            }
        ),
    ]


def learner_of(backbone: Backbone) -> Learner:
    model = attach(backbone.model, resolve(AdapterSettings()), 0)
    return Learner(model, LearnerSettings(lr=1e-2), CPU)


def loss_sums(learner: Learner, examples: list[Example]) -> list[float]:
    return [each.loss_sum for each in run_to_end(score(learner.model, examples, CPU, pack_tokens=1 << 20))]


def test_packing_changes_nothing(backbone: Backbone) -> None:
    """Packed records, with and without images, have the scores of separate ones; the image affects the score."""
    learner, decoder = learner_of(backbone), decoder_of(backbone)
    examples = examples_of(decoder)
    together = loss_sums(learner, examples)
    assert together == pytest.approx([loss_sums(learner, [each])[0] for each in examples], abs=1e-3)
    other = decoder.decode_value({"prompt": "what is it?", "completion": " a dog", "image": as_base64(make_image(9))})
    assert abs(loss_sums(learner, [other])[0] - together[0]) > 1e-3


def test_the_loss_is_that_of_the_familys_own_forward_pass(backbone: Backbone) -> None:
    """The loss of one record equals that of the model called with all outputs of its processor."""
    learner, decoder = learner_of(backbone), decoder_of(backbone)
    example = examples_of(decoder)[0]
    features = {name: torch.from_numpy(array) for name, array in example.images[0].inputs.features.items()}
    ids = torch.from_numpy(example.input_ids.astype(np.int64))[None]
    if example.positions is not None:
        features["mm_token_type_ids"] = (ids == backbone.vision.image_token).int()  # type: ignore[union-attr]
    with torch.no_grad():
        logits = backbone.model(input_ids=ids, **features).logits[0]
    learned = torch.from_numpy(np.flatnonzero(example.labels != -100))
    expected = torch.nn.functional.cross_entropy(logits[learned - 1], ids[0, learned], reduction="sum")
    assert loss_sums(learner, [example])[0] == pytest.approx(float(expected), abs=1e-3)


def test_the_language_model_learns_and_the_vision_tower_does_not(backbone: Backbone) -> None:
    """A few steps lower the loss; only the decoder has adapters, and no other weight changes."""
    learner, decoder = learner_of(backbone), decoder_of(backbone)
    tower = {n: p.clone() for n, p in backbone.model.named_parameters() if "head_lora" not in n}
    examples = examples_of(decoder)
    losses = [learner.step(examples).loss for _ in range(5)]
    assert losses[-1] < losses[0] - 0.1
    assert all(".layers." in bank.name for bank in learner.banks)
    assert not any("vision" in bank.name or "visual" in bank.name for bank in learner.banks)
    assert len(learner.banks) == 6  # gate, up and down of two layers
    now = dict(backbone.model.named_parameters())
    assert all(torch.equal(now[name], old) for name, old in tower.items())


def test_the_vision_tower_can_be_adapted_too(folder: Path, backbone: Backbone) -> None:
    """With experts in every linear of tower and projector, images are routed by the regime of their own record."""
    names = {name.rpartition(".")[2] for name in outline(BackboneSettings(model=str(folder))).tower_linears}
    config = resolve(AdapterSettings(preset="mh-moe", vision_modules=tuple(names)), regimes=2)
    model = attach(backbone.model, config, 0)
    learner = Learner(model, LearnerSettings(lr=1e-2), CPU)
    examples = examples_of(decoder_of(backbone))
    vision_banks = [bank for bank in learner.banks if bank.info.is_vision]
    assert {bank.name for bank in vision_banks} == set(outline(BackboneSettings(model=str(folder))).tower_linears)
    assert len(learner.banks) - len(vision_banks) == 6
    for _ in range(3):
        learner.step(examples)
    moved = {bank.name: bank.B.clone() for bank in vision_banks}
    assert (
        sum(bool(B.any()) for B in moved.values()) >= len(vision_banks) - 7
    )  # some towers do not use their last block
    learner.step([examples[1]])
    assert all(
        torch.equal(bank.B, moved[bank.name]) for bank in vision_banks
    )  # a record without an image does not train them
    together = loss_sums(learner, examples)
    assert together == pytest.approx([loss_sums(learner, [each])[0] for each in examples], abs=1e-3)

    for bank in vision_banks:
        assert bank.bias_HKN is not None
        bank.bias_HKN[:, 3, 1] = 100.0
    for number in (0, 2, 3):
        slots = [int(i == number) for i in range(len(examples))]
        scores = run_to_end(score(model, examples, CPU, pack_tokens=1 << 20, slots=slots))
        changed = [abs(each.loss_sum - before) > 1e-3 for each, before in zip(scores, together, strict=True)]
        assert changed == [i == number for i in range(len(examples))]

    with model.disable_adapter():
        frozen = loss_sums(learner, examples)
    slots = [0, NO_REGIME, 0, NO_REGIME]
    mixed = [each.loss_sum for each in run_to_end(score(model, examples, CPU, pack_tokens=1 << 20, slots=slots))]
    assert mixed == pytest.approx([together[0], frozen[1], together[2], frozen[3]], abs=1e-3)
    assert all(abs(found - other) > 1e-3 for found, other in zip(together, frozen, strict=True))

    prompts = [prompt_of(example) for example in examples]
    given = run_to_end(decode(model, prompts, [3] * 4, frozenset(), CPU, [0, 0, 1, 0]))
    for prompt, slot, answer in zip(prompts, [0, 0, 1, 0], given, strict=True):
        assert run_to_end(decode(model, [prompt], [3], frozenset(), CPU, [slot])) == [answer]


def test_a_regimes_own_adapter_acts_on_its_images_only(folder: Path, backbone: Backbone) -> None:
    """Tokens of the vision tower belong to the record with the image, in a pass over records of two regimes."""
    names = {name.rpartition(".")[2] for name in outline(BackboneSettings(model=str(folder))).tower_linears}
    model = attach(backbone.model, resolve(AdapterSettings(vision_modules=tuple(names))), 0)
    learner = Learner(model, LearnerSettings(lr=1e-2), CPU)
    learner.add_regime(1, seed=1)
    examples = examples_of(decoder_of(backbone))
    before = loss_sums(learner, examples)
    for bank in learner.banks:
        if bank.info.is_vision and bank.adapter == "regime1":
            torch.nn.init.normal_(bank.B, std=0.3, generator=torch.Generator().manual_seed(3))
    for number in range(4):
        slots = [int(i == number) for i in range(len(examples))]
        scores = run_to_end(score(model, examples, CPU, pack_tokens=1 << 20, slots=slots))
        changed = [abs(each.loss_sum - old) > 1e-3 for each, old in zip(scores, before, strict=True)]
        assert changed == [i == number and bool(examples[i].images) for i in range(len(examples))]


def test_prompts_decoded_together_give_the_texts_of_each(backbone: Backbone) -> None:
    """Prompts of different lengths, with one, no and two images, padded into one batch."""
    learner, decoder = learner_of(backbone), decoder_of(backbone)
    examples = examples_of(decoder)
    for _ in range(3):
        learner.step(examples)
    prompts = [prompt_of(example) for example in examples]
    limits = [6] * len(prompts)
    together = run_to_end(decode(learner.model, prompts, limits, decoder.stop, CPU))
    separate = [run_to_end(decode(learner.model, [p], [6], decoder.stop, CPU))[0] for p in prompts]
    assert together == separate


def test_a_prompt_is_the_beginning_of_an_example(backbone: Backbone) -> None:
    """A record and a request give the same tokens, images and positions."""
    decoder = decoder_of(backbone)
    image = as_base64(make_image(1))
    own = prompt_of(decoder.decode_value({"prompt": "what is it?", "completion": " a dog", "image": image}))
    request = decoder.prompt("what is it?", image)
    assert request.ids == own.ids
    assert [p.data for p in request.images] == [p.data for p in own.images]
    if own.positions is not None:
        assert request.positions is not None
        assert np.array_equal(request.positions, own.positions)


def test_records_are_decoded_without_the_weights(folder: Path, backbone: Backbone) -> None:
    """To the same tokens, inputs and positions."""
    settings = BackboneSettings(model=str(folder))
    loaded = load_preprocessing(settings, outline(settings))
    decoder = Decoder(loaded.tokenizer, StreamSettings(), loaded.vocab_size, (), loaded.vision, loaded.template)
    assert loaded.vocab_size == backbone.vocab_size
    for own, other in zip(examples_of(decoder), examples_of(decoder_of(backbone)), strict=True):
        assert np.array_equal(own.input_ids, other.input_ids)
        assert np.array_equal(own.labels, other.labels)
        positions = [[] if example.positions is None else example.positions.tolist() for example in (own, other)]
        assert positions[0] == positions[1]


def test_an_example_is_restored_from_its_bytes(backbone: Backbone) -> None:
    """Tokens, labels and image files, as a snapshot keeps them, are sufficient."""
    decoder = decoder_of(backbone)
    for example in examples_of(decoder):
        if example.images:
            bare = Example(example.input_ids, example.labels)
            again = decoder.with_images(bare, [image.data for image in example.images])
            assert again.image_starts == example.image_starts
            assert (again.positions is None) == (example.positions is None)
            if again.positions is not None and example.positions is not None:
                assert np.array_equal(again.positions, example.positions)
            for one, other in zip(again.images, example.images, strict=True):
                assert all(np.array_equal(one.inputs.features[n], other.inputs.features[n]) for n in one.axes)


def test_an_unusable_record_is_refused(backbone: Backbone) -> None:
    """With its reason; the message states what was found."""
    decoder = decoder_of(backbone)
    cases: list[tuple[dict[str, Any], Reason, str]] = [
        ({"prompt": "a <image> b <image>", "completion": "c"}, Reason.BAD_FORM, "once for each of 1 images"),
        ({"text": "a"}, Reason.BAD_FORM, "image requires"),
        ({"prompt": "a", "completion": "c", "image": ["!"] * 9}, Reason.TOO_LARGE, "at most 8 images"),
        ({"prompt": "a", "completion": "c", "image": "!"}, Reason.BAD_IMAGE, "base64"),
        ({"prompt": "a", "completion": "c", "image": "https://a/b.png"}, Reason.BAD_IMAGE, "never downloaded"),
        ({"prompt": "a", "completion": "c", "image": 3}, Reason.BAD_TYPE, "a number"),
    ]
    for record, reason, message in cases:
        with pytest.raises(RecordError, match=message) as caught:
            decoder.decode_value({"image": as_base64(make_image()), **record})
        assert caught.value.reason is reason


def test_text_cannot_forge_an_image(backbone: Backbone) -> None:
    """The image token written as text is encoded as text; as an id it is refused."""
    decoder = decoder_of(backbone)
    assert backbone.vision is not None
    name = backbone.tokenizer.convert_ids_to_tokens(backbone.vision.image_token)
    example = decoder.decode_value({"prompt": f"look {name} here", "completion": " a"})
    assert backbone.vision.image_token not in example.input_ids
    with pytest.raises(RecordError, match="one placeholder per image, found 1 for 0 images"):
        decoder.decode_value({"input_ids": [9, backbone.vision.image_token, 10]})


def test_an_image_is_never_cut_off(backbone: Backbone) -> None:
    """A long prompt loses text around its image; a record whose image does not fit is refused."""
    long = "the quick brown fox jumps over the lazy dog " * 30
    image = as_base64(make_image(1))
    decoder = decoder_of(backbone, max_tokens=200, batch_tokens=200)
    for prompt in (f"{long}<image> what?", f"<image>{long}", f"{long}<image>{long}"):
        kept = decoder.decode_value({"prompt": prompt, "completion": " a", "image": image})
        assert len(kept) == 200
        ids = kept.images[0].inputs.token_ids
        assert tuple(kept.input_ids[kept.image_starts[0] : kept.image_starts[0] + len(ids)].tolist()) == ids
    too_small = decoder_of(backbone, max_tokens=len(ids), batch_tokens=200)
    with pytest.raises(RecordError, match="images cannot be truncated"):
        too_small.decode_value({"prompt": f"<image>{long}", "completion": " a", "image": image})


def test_cached_token_ids_give_the_same_inputs(backbone: Backbone) -> None:
    """Token ids are cached by image size; ids and features are still those of the whole processor."""
    vision = backbone.vision
    assert vision is not None
    for seed, size in ((1, (40, 50)), (2, (40, 50)), (3, (90, 30)), (4, (30, 90))):
        image = Image.open(BytesIO(make_image(seed, size))).convert("RGB")
        ids, features = vision._process([image])
        for inputs in (vision.inputs(image), vision.inputs(image)):
            assert list(inputs.token_ids) == ids
            assert all(np.array_equal(inputs.features[name], features[name]) for name in vision.axes)
    assert vision._direct
