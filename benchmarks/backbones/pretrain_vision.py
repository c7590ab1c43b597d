"""Train a vision tower and a projector for the bundled nano backbone; its language model does not change.

    python -m benchmarks.backbones.pretrain_vision --data ../shared/data/images --out build/nano-vl

1. The tower, a ViT on 64 x 64 pixels, learns to classify: CIFAR-10 and MNIST classes, Omniglot letters, easy-VQA shapes
   and colours. Each set has its own linear head, which is discarded.
2. Tower and projector learn through the frozen language model to answer questions: recognition, digit, colour, shape
   and presence.

Some material is held back for streams to teach: the classes in `HELD_BACK`, all questions of alphabet, absence,
counting and objects, and all test images. The result is a function of data and seed.
"""

import argparse
import json
import math
import random
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.backbones.image_tasks import Json, arrays, records, rows
from streamlearn.backbone import nano_vl

HELD_BACK = {"recognition": {"deer", "frog", "ship", "truck"}, "digit": {"7", "8", "9"}}
TAUGHT = ("recognition", "digit", "colour", "shape", "presence")
"""Tasks of the second stage."""
MIRRORED = "cifar10"
"""The set whose images may be mirrored."""


@dataclass(frozen=True)
class VisionRecipe:
    """Everything that determines the weights, apart from the data."""

    seed: int = 20261121
    tower_epochs: int = 40
    tower_batch: int = 64
    tower_lr: float = 1e-3
    answer_epochs: int = 6
    answer_batch: int = 32
    answer_lr: float = 1e-3
    tower_share: float = 0.1
    """Learning rate of the tower in the second stage, as a share of the projector's."""
    weight_decay: float = 0.05


@dataclass(frozen=True)
class Labeled:
    """An image and its class for one of the heads."""

    head: str
    pixels: NDArray[np.uint8]
    """(64, 64, 3)."""
    label: int

    @property
    def mirror(self) -> bool:
        """A mirrored letter would change its meaning."""
        return self.head == MIRRORED


def to_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Convert an image to RGB pixels of the tower's input size, before normalization."""
    side = nano_vl.IMAGE_SIDE
    return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


def labeled(folder: Path) -> tuple[list[Labeled], dict[str, int]]:
    """Return the training images of the first stage, and the number of classes of each head."""
    images: list[tuple[str, NDArray[np.uint8], str]] = []
    for name, task in (("cifar10", "recognition"), ("mnist", "digit"), ("omniglot100", "alphabet")):
        for pixels, label in arrays(folder, name, "train"):
            if label not in HELD_BACK.get(task, ()):
                images.append((name, to_pixels(Image.fromarray(pixels)), label))
    for row, data in rows(folder, "easy_vqa", "train"):
        kind = "colour" if row["question"].startswith("what") and "color" in row["question"] else "shape"
        if row["question"].startswith("what"):
            images.append((kind, to_pixels(Image.open(BytesIO(data))), row["answer"]))
    names: dict[str, list[str]] = {}
    for head, _, label in images:
        if label not in names.setdefault(head, []):
            names[head].append(label)
    return [Labeled(h, p, names[h].index(label)) for h, p, label in images], {h: len(n) for h, n in names.items()}


def augmented(pixels: NDArray[np.uint8], rng: random.Random, *, mirror: bool) -> NDArray[np.uint8]:
    """Shift by up to an eighth, mirror if permitted, and change the brightness by up to a fifth."""
    reach = pixels.shape[0] // 8
    padded = np.pad(pixels, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    top, left = rng.randrange(2 * reach + 1), rng.randrange(2 * reach + 1)
    cut = padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]
    if mirror and rng.random() < 0.5:
        cut = cut[:, ::-1]
    brighter: NDArray[np.uint8] = np.clip(cut * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    return brighter


def tensor(pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Convert to (B, 3, 64, 64) in -1 to 1, as the image processor of `nano_vl` does."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1


def schedule(step: int, steps: int) -> float:
    """Return the learning-rate factor: a warm-up over a twentieth of the steps, then a cosine decay."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


Batch = TypeVar("Batch", Labeled, "Question")


@dataclass(frozen=True)
class Stage:
    """What one of the two stages trains, and how."""

    name: str
    module: nn.Module
    groups: Sequence[dict[str, Any]]
    """Parameter groups; `scale` is the group's learning rate as a share of `lr`."""
    lr: float
    epochs: int
    batch_size: int
    max_norm: float = float("inf")


def train(
    stage: Stage,
    examples: Sequence[Batch],
    loss_of: Callable[[Sequence[Batch], Tensor], Tensor],
    recipe: VisionRecipe,
) -> None:
    """Run a stage; `loss_of` gets examples and their augmented pixels."""
    optimizer = torch.optim.AdamW(list(stage.groups), lr=stage.lr, weight_decay=recipe.weight_decay)
    size, steps_per_epoch, step = stage.batch_size, len(examples) // stage.batch_size, 0
    for epoch in range(stage.epochs):
        rng = random.Random(f"{recipe.seed} {stage.name} {epoch}")
        order = rng.sample(range(len(examples)), len(examples))
        started, losses = time.monotonic(), []
        for start in range(0, steps_per_epoch * size, size):
            batch = [examples[i] for i in order[start : start + size]]
            pixels = tensor([augmented(example.pixels, rng, mirror=example.mirror) for example in batch])
            for group in optimizer.param_groups:
                group["lr"] = stage.lr * group["scale"] * schedule(step, stage.epochs * steps_per_epoch)
            loss = loss_of(batch, pixels)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(stage.module.parameters(), stage.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            step += 1
        seconds = time.monotonic() - started
        print(f"{stage.name} epoch {epoch + 1} loss {np.mean(losses):.3f} {seconds:.0f} s", flush=True)


def train_tower(tower: nn.Module, folder: Path, recipe: VisionRecipe) -> None:
    """Train the tower on classification (stage 1)."""
    examples, heads = labeled(folder)
    width = nano_vl.VISION["hidden_size"]
    classifiers = nn.ModuleDict({head: nn.Linear(width, classes) for head, classes in heads.items()})
    both = nn.ModuleDict({"tower": tower, "classifiers": classifiers})

    def loss_of(batch: Sequence[Labeled], pixels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            pooled = tower(pixels).last_hidden_state.mean(1).float()
        return classification_loss(classifiers, pooled, batch)

    groups = [{"params": list(both.parameters()), "scale": 1.0}]
    stage = Stage("tower", both, groups, recipe.tower_lr, recipe.tower_epochs, recipe.tower_batch)
    train(stage, examples, loss_of, recipe)


def classification_loss(classifiers: nn.ModuleDict, pooled: Tensor, batch: Sequence[Labeled]) -> Tensor:
    """Return the mean cross-entropy over the heads' own images."""
    losses = []
    for head, classifier in classifiers.items():
        mine = [i for i, example in enumerate(batch) if example.head == head]
        if mine:
            target = torch.tensor([batch[i].label for i in mine])
            losses.append(F.cross_entropy(classifier(pooled[mine]), target, reduction="sum", label_smoothing=0.05))
    return torch.stack(losses).sum() / len(batch)


def taught(folder: Path, split: Any) -> list[Json]:
    """Return the records of the second stage, without the held-back classes."""
    return [
        record
        for task in TAUGHT
        for record in records(folder, task, split)
        if record["meta"]["answer"] not in HELD_BACK.get(task, ())
    ]


@dataclass(frozen=True)
class Question:
    """An encoded record."""

    ids: list[int]
    answer: int
    """Index of the first token of the completion."""
    pixels: NDArray[np.uint8]
    task: str
    mirror: bool


def encoded(record: Json, tokenizer: Any) -> Question:
    """Encode a record, with the image tokens in place of the image."""
    text = record["prompt"].removeprefix("<image>")
    image = [nano_vl.IMAGE_TOKEN_ID] * nano_vl.IMAGE_TOKENS
    prompt = image + tokenizer(text, add_special_tokens=False)["input_ids"]
    completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    pixels = to_pixels(Image.open(BytesIO(b64decode(record["image"]))))
    task = record["meta"]["task"]
    return Question(prompt + completion, len(prompt), pixels, task, task == "recognition")


def padded(questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
    """Return ids and labels (B, T), padded on the right."""
    longest = max(len(q.ids) for q in questions)
    ids = torch.tensor([q.ids + [1] * (longest - len(q.ids)) for q in questions])
    labels = torch.tensor([[-100] * q.answer + q.ids[q.answer :] + [-100] * (longest - len(q.ids)) for q in questions])
    return ids, labels


def train_answers(model: Any, folder: Path, recipe: VisionRecipe) -> None:
    """Train tower and projector on questions (stage 2)."""
    tokenizer = nano_vl.tokenizer()
    questions = [encoded(record, tokenizer) for record in taught(folder, "train")]
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    model.requires_grad_(False)
    both = nn.ModuleDict({"tower": tower, "projector": projector}).requires_grad_(True)
    groups = [
        {"params": list(projector.parameters()), "scale": 1.0},
        {"params": list(tower.parameters()), "scale": recipe.tower_share},
    ]

    def loss_of(batch: Sequence[Question], pixels: Tensor) -> Tensor:
        ids, labels = padded(batch)
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(input_ids=ids, pixel_values=pixels, labels=labels).loss
        return loss

    stage = Stage("answers", both, groups, recipe.answer_lr, recipe.answer_epochs, recipe.answer_batch, max_norm=1.0)
    train(stage, questions, loss_of, recipe)


@torch.no_grad()
def accuracy(model: Any, folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the exact-match accuracy on test images, teacher-forced, for taught and for held-back classes."""
    tokenizer = nano_vl.tokenizer()
    figures: dict[str, dict[str, float]] = {}
    for task in tasks:
        right: dict[str, list[bool]] = {}
        for record in records(folder, task, "test"):
            question = encoded(record, tokenizer)
            ids, labels = padded([question])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, pixel_values=tensor([question.pixels])).logits[0]
            wanted = labels[0, question.answer :]
            hit = bool((logits[question.answer - 1 : -1].argmax(-1) == wanted).all())
            known = task in TAUGHT and record["meta"]["answer"] not in HELD_BACK.get(task, ())
            right.setdefault("taught" if known else "held back", []).append(hit)
        figures[task] = {name: round(float(np.mean(hits)), 3) for name, hits in right.items()}
        print(task, figures[task], flush=True)
    return figures


def save_vision_weights(model: Any, file: Path) -> None:
    """Save vision tower and projector in bfloat16."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith(nano_vl.VISION_PREFIXES)
    }
    save_file(tensors, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of image sets; see benchmarks.backbones.image_tasks"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished weights")
    arguments = parser.parse_args()
    recipe = VisionRecipe()
    torch.manual_seed(recipe.seed)
    model = nano_vl.assemble(torch.float32, vision_weights=None)
    train_tower(model.model.vision_tower, arguments.data, recipe)
    train_answers(model, arguments.data, recipe)
    figures = accuracy(model, arguments.data, ["recognition", "digit", "colour", "shape", "presence", "absence"])
    save_vision_weights(model, arguments.out / nano_vl.VISION_WEIGHTS)
    written = {"recipe": asdict(recipe), "test_accuracy": figures}
    (arguments.out / "pretrain.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
