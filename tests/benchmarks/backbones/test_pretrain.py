"""Pre-training of the bundled backbones, and their image tasks."""

import base64
import gzip
import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.backbones import pretrain, pretrain_vision
from benchmarks.backbones.image_tasks import TASKS, easy_vqa_kind, png, records
from benchmarks.backbones.pretrain import IGNORED, PretrainRecipe
from benchmarks.backbones.pretrain_vision import HELD_BACK, Question, VisionRecipe
from benchmarks.learn.suites import Draw, make_suite
from streamlearn.backbone import nano_vl
from streamlearn.errors import UsageError
from tests.doubles import SENTENCES
from tests.vision import as_base64, make_image

RECIPE = PretrainRecipe(steps=4, tokens_per_step=64, warmup_steps=2, held_out=2, max_tokens=16)

SHORT = PretrainRecipe(steps=2, held_out=2)


def model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=320, num_hidden_layers=1, head_dim=8, **sizes))


def pieces() -> list[list[int]]:
    tokenizer = pretrain.train_tokenizer(list(SENTENCES) * 4, 320)
    return pretrain.encode(list(SENTENCES) * 4, tokenizer, RECIPE.max_tokens)


def test_texts_are_read_from_every_file(tmp_path: Path) -> None:
    """In the order of files and lines; a folder without any is refused."""
    for name, texts in (("b", ["three"]), ("a", ["one", "two"])):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    assert pretrain.read_texts(tmp_path) == ["one", "two", "three"]
    with pytest.raises(SystemExit, match="--data: expected a folder of gzipped JSONL files"):
        pretrain.read_texts(tmp_path / "nowhere")


def test_batches_are_bounded_and_repeat(tmp_path: Path) -> None:
    """Every piece once an epoch, padded on the right within the bound, in an order that the seed determines."""
    own = pieces()
    one, two = pretrain.batches(own, RECIPE), pretrain.batches(own, RECIPE)
    found: list[list[int]] = []
    while len(found) < len(own):
        batch_BT, again_BT = next(one), next(two)
        assert torch.equal(batch_BT, again_BT)
        assert batch_BT.shape[0] == 1 or batch_BT.numel() <= RECIPE.tokens_per_step + 16 * len(batch_BT)
        found += [[token for token in piece if token != IGNORED] for piece in batch_BT.tolist()]
    assert sorted(found) == sorted(own)


def test_the_loss_leaves_padding_out() -> None:
    """A batch of two lengths has the mean loss of its real tokens."""
    made, (first, second) = model(), ([5, 6, 7, 8], [9, 10])
    with torch.no_grad():
        found = pretrain.language_loss(made, pretrain.pad([first, second]), bf16=False)
        separate = [pretrain.language_loss(made, torch.tensor([each]), bf16=False) for each in (first, second)]
    torch.testing.assert_close(found, (3 * separate[0] + separate[1]) / 4)


def test_the_learning_rate_warms_up_and_decays() -> None:
    """From a fraction to the peak, and down to a twentieth of it."""
    rates = [pretrain.learning_rate(step, PretrainRecipe()) for step in (0, 199, 200, PretrainRecipe.steps)]
    assert rates == pytest.approx(
        [PretrainRecipe.peak_lr / 200, PretrainRecipe.peak_lr, PretrainRecipe.peak_lr, 0.05 * PretrainRecipe.peak_lr]
    )


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Path) -> None:
    """Weights and moments after four steps equal those of two steps, a checkpoint and two more."""

    def train(made: Qwen3ForCausalLM, optimizer: torch.optim.AdamW, steps: range) -> None:
        source = pretrain.batches(pieces(), RECIPE)
        for step, batch_BT in zip(range(steps.stop), source, strict=False):
            if step in steps:
                torch.autograd.backward(pretrain.language_loss(made, batch_BT, bf16=False))
                optimizer.step()
                optimizer.zero_grad()

    straight, stopped, resumed = model(), model(), model(seed=1)
    optimizers = [pretrain.make_optimizer(each, RECIPE) for each in (straight, stopped, resumed)]
    assert pretrain.load_checkpoint(tmp_path, resumed, optimizers[2]) == 0
    train(straight, optimizers[0], range(4))
    train(stopped, optimizers[1], range(2))
    pretrain.save_checkpoint(tmp_path, stopped, optimizers[1], 2)
    assert pretrain.load_checkpoint(tmp_path, resumed, optimizers[2]) == 2
    train(resumed, optimizers[2], range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


def test_a_run_writes_model_and_figures(tmp_path: Path) -> None:
    """Two steps on a few texts, started twice with the same result."""
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": f"the quick brown fox number {i} runs"}) for i in range(12)]
    (data / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    losses = []
    for name in ("one", "two"):
        pretrain.pretrain(data, tmp_path / name, SHORT, bf16=False)
        losses.append(json.loads((tmp_path / name / "pretrain.json").read_text())["held_out_loss"])
    assert losses[0] == losses[1]
    assert (tmp_path / "one/model.safetensors").exists()
    assert pretrain.nano_config().vocab_size == 4096


PIXELS = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def test_images_are_normalized_like_the_processors() -> None:
    """Training sees the tensors that the daemon's processor gives for the same image."""
    image = Image.fromarray(PIXELS).resize((90, 40))
    expected = nano_vl.processor().image_processor(images=[image], return_tensors="pt")["pixel_values"]
    found = pretrain_vision.tensor([pretrain_vision.to_pixels(image)])
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0)


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


QUESTIONS = [
    ("what color is the circle?", "red", "colour"),
    ("what is the color of the shape?", "red", "colour"),
    ("what shape is present?", "circle", "shape"),
    ("is there a red shape?", "yes", "presence"),
    ("does the image contain a square?", "no", "presence"),
    ("is there not a circle?", "no", "absence"),
    ("is no red shape present?", "no", "absence"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    labels = {
        "cifar10": ["cat", "dog"],
        "mnist": ["0", "1"],
        "omniglot100": ["Old_Greek/character01", "Latin/character02"],
    }
    for name, names in labels.items():
        shape = (4, 8, 8, 3) if name == "cifar10" else (4, 8, 8)
        arrays: dict[str, Any] = {"label_names": np.array(names)}
        for split in ("train", "test"):
            arrays |= {
                f"{split}_images": np.zeros(shape, np.uint8),
                f"{split}_labels": np.array([0, 1, 1, 0], np.uint8),
            }
        np.savez(tmp_path / f"{name}.npz", **arrays)
    questions = [{"id": str(i), "question": q, "answer": a} for i, (q, a, _) in enumerate(QUESTIONS)]
    pack(tmp_path, "easy_vqa", questions)
    pack(tmp_path, "coco256", [{"id": "1", "objects": {"cup": 1, "dog": 3}}, {"id": "2", "objects": {}}])
    return tmp_path


def pack(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with tarfile.open(folder / f"{name}_images.tar", "w") as tar:
        for split in ("train", "test"):
            data = png(np.full((8, 8, 3), 7 if split == "train" else 9, np.uint8))
            member = tarfile.TarInfo(f"{split}/1.png")
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
            lines = b"".join(orjson.dumps({**row, "image": f"{split}/1.png"}) + b"\n" for row in rows)
            (folder / f"{name}.{split}.jsonl.gz").write_bytes(gzip.compress(lines))


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("recognition", [" cat", " dog", " dog", " cat"]),
        ("digit", [" 0", " 1", " 1", " 0"]),
        ("alphabet", [" Old Greek", " Latin", " Latin", " Old Greek"]),
        ("colour", [" red", " red"]),
        ("shape", [" circle"]),
        ("presence", [" yes", " no"]),
        ("absence", [" no", " no"]),
        ("counting", [" 1", " 3"]),
        ("objects", [" dog, cup"]),
    ],
)
def test_every_task_has_questions_and_answers(folder: Path, task: str, answers: list[str]) -> None:
    """Prompts contain the placeholder; the image is a complete file of the requested split."""
    found = list(records(folder, task, "test"))
    assert [record["completion"] for record in found] == answers
    for record in found:
        assert record["prompt"].startswith("<image>\nQuestion: ")
        assert record["meta"]["task"] == task
        image = Image.open(BytesIO(base64.b64decode(record["image"])))
        assert image.size == (8, 8)
        if task in ("colour", "counting"):
            assert image.getpixel((0, 0)) == (9, 9, 9)


def test_questions_are_classified() -> None:
    """Those of easy-VQA, by their words."""
    assert [easy_vqa_kind(question) for question, _, _ in QUESTIONS] == [kind for _, _, kind in QUESTIONS]


def test_the_suite_has_one_task_after_another(folder: Path) -> None:
    """On the image-text backbone; without the folder the message says what is missing."""
    suite = make_suite("images", Draw([folder.parent, folder], records=2, evaluated=1, seed=0))
    assert [stretch.tasks for stretch in suite.segments] == [(task,) for task in TASKS]
    assert max(len(stretch.records) for stretch in suite.segments) == 2
    assert all(len(own.scored) == 1 for own in suite.tasks.values())
    assert suite.backbone == "builtin:nano-vl"
    with pytest.raises(UsageError, match="image sets"):
        make_suite("images", Draw([folder.parent], records=2))
