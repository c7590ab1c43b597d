"""The training script of the vision tower and projector, without training."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.backbones import pretrain_vision
from benchmarks.backbones.pretrain_vision import HELD_BACK, Question, VisionRecipe
from streamlearn.backbone import nano_vl
from tests.backbone.test_image_tasks import folder
from tests.vision import as_base64, make_image

__all__ = ["folder"]  # a fixture

PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def test_images_are_normalized_like_the_processors() -> None:
    """Training sees the tensors that the daemon's processor gives for the same image."""
    image = Image.fromarray(PIXELS).resize((90, 40))
    expected = nano_vl.processor().image_processor(images=[image], return_tensors="pt")["pixel_values"]
    found = pretrain_vision.tensor([pretrain_vision.to_pixels(image)])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


def test_augmentation_depends_on_its_generator_only() -> None:
    """The same draw gives the same image; mirroring is optional."""
    one, two = (pretrain_vision.augmented(PIXELS, random.Random(3), mirror=True) for _ in range(2))
    assert np.array_equal(one, two)
    assert one.shape == PIXELS.shape
    assert not np.array_equal(one, pretrain_vision.augmented(PIXELS, random.Random(4), mirror=True))


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    """From a fraction of the peak to about the peak, then down."""
    rates = [pretrain_vision.schedule(step, 100) for step in (0, 4, 50, 100)]
    assert rates == pytest.approx([0.2, 1.0, 0.5, 0.0], abs=0.01)


def test_a_record_becomes_image_tokens_prompt_and_completion() -> None:
    """The answer starts where the prompt ends, and only the answer is learned."""
    tokenizer = nano_vl.tokenizer()
    image, meta = as_base64(make_image()), {"task": "recognition", "answer": "cat"}
    record = {"prompt": "<image>\nQuestion: what?\n\nOutput:", "completion": " cat", "image": image, "meta": meta}
    question = pretrain_vision.encoded(record, tokenizer)
    assert question.ids[: nano_vl.IMAGE_TOKENS] == [nano_vl.IMAGE_TOKEN_ID] * nano_vl.IMAGE_TOKENS
    assert tokenizer.decode(question.ids[question.answer : -1]) == " cat"
    assert question.mirror
    ids, labels = pretrain_vision.padded([question, Question([1, 2, 3], 2, PIXELS, "digit", False)])
    assert ids.shape == labels.shape == (2, len(question.ids))
    assert labels[1].tolist() == [-100, -100, 3] + [-100] * (len(question.ids) - 3)


def test_batches_are_of_whole_size_and_repeat() -> None:
    """Each question at most once an epoch, in an order that the seed and the epoch determine."""
    questions = [Question([1, 2, 3 + i], 1, PIXELS, "digit", False) for i in range(7)]
    recipe = VisionRecipe(answer_batch=3)

    def order(epoch: int) -> list[int]:
        return [q.ids[-1] for batch, _ in pretrain_vision.answer_batches(questions, recipe, epoch) for q in batch]

    assert len(order(0)) == len(set(order(0))) == 6
    assert order(0) == order(0) != order(1)


def test_held_back_classes_are_not_taught(folder: Path) -> None:
    """Neither stage reads them, nor tasks that are not taught."""
    held_back = {answer for answers in HELD_BACK.values() for answer in answers}
    records = pretrain_vision.taught(folder, "train")
    assert {record["meta"]["task"] for record in records} <= set(pretrain_vision.TAUGHT)
    assert not held_back & {record["meta"]["answer"] for record in records}
    labelled, num_classes = pretrain_vision.labelled(folder)
    assert num_classes == {"cifar10": 2, "mnist": 2, "omniglot100": 2, "colour": 1, "shape": 1}
    assert all(each.label < num_classes[each.head] for each in labelled)


def test_a_checkpoint_restores_weights_moments_and_epoch(tmp_path: Path) -> None:
    """Without one training starts at epoch 0."""
    torch.manual_seed(0)
    modules = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(module.parameters()) for module in modules]
    file = tmp_path / "tower.checkpoint"
    assert pretrain_vision.load_checkpoint(file, modules[1], optimizers[1]) == 0
    torch.autograd.backward(modules[0](torch.ones(1, 3)).sum())
    optimizers[0].step()
    pretrain_vision.save_checkpoint(file, modules[0], optimizers[0], 5)
    assert pretrain_vision.load_checkpoint(file, modules[1], optimizers[1]) == 5
    for p, q in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizers[0].state[p]["exp_avg"], optimizers[1].state[q]["exp_avg"])
