"""Train the vision tower and the projector of the bundled image-text backbone; the language model does not change.

    python -m streamlearn.backbone.pretrain_vision --data ../shared/data/images --out build/nano-vl

1. The tower, a ViT on 64 x 64 pixels, is trained to classify images: classes of CIFAR-10 and MNIST, letters of
   Omniglot, shapes and colours of easy-VQA. Each set has its own linear head; the heads are discarded.
2. Tower and projector are trained through the frozen language model to answer questions: recognition, digit, colour,
   shape and presence.

Held back, so that a stream has something new to teach: the classes `HELD_BACK`, all questions of alphabet, absence,
counting and objects, and all test images. The result depends only on data and seed. Every epoch writes a checkpoint; a
run that was stopped continues from the last one.
"""

import argparse
import json
import math
import random
import time
from base64 import b64decode
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from streamlearn.backbone import nano_vl
from streamlearn.backbone.image_tasks import Json, arrays, records, rows

HELD_BACK = {"recognition": {"deer", "frog", "ship", "truck"}, "digit": {"7", "8", "9"}}
TAUGHT = ("recognition", "digit", "colour", "shape", "presence")
"""Tasks of stage 2."""
MIRRORED = "cifar10"
"""The set whose images are mirrored at random; mirroring would change letters and digits."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters; with the data, they determine the weights."""

    seed: int = 20261121
    tower_epochs: int = 40
    tower_batch: int = 64
    tower_lr: float = 1e-3
    answer_epochs: int = 6
    answer_batch: int = 32
    answer_lr: float = 1e-3
    tower_share: float = 0.1
    """Learning rate of the tower in stage 2, as a fraction of that of the projector."""
    weight_decay: float = 0.05


@dataclass(frozen=True)
class Labelled:
    """An image and its class for one of the heads."""

    head: str
    pixels: NDArray[np.uint8]
    """(64, 64, 3)."""
    label: int


def resized(image: Image.Image) -> NDArray[np.uint8]:
    """Scale an image to the tower's input size: (64, 64, 3), not normalized."""
    side = nano_vl.IMAGE_SIDE
    return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC))


def labelled(folder: Path) -> tuple[list[Labelled], dict[str, int]]:
    """Load the images of stage 1, and the number of classes of each head."""
    found: list[tuple[str, NDArray[np.uint8], str]] = []
    for name, task in (("cifar10", "recognition"), ("mnist", "digit"), ("omniglot100", "alphabet")):
        for pixels, label in arrays(folder, name, "train"):
            if label not in HELD_BACK.get(task, ()):
                found.append((name, resized(Image.fromarray(pixels)), label))
    for row, data in rows(folder, "easy_vqa", "train"):
        kind = "colour" if row["question"].startswith("what") and "color" in row["question"] else "shape"
        if row["question"].startswith("what"):
            found.append((kind, resized(Image.open(BytesIO(data))), row["answer"]))
    names: dict[str, list[str]] = {}
    for head, _, label in found:
        if label not in names.setdefault(head, []):
            names[head].append(label)
    return [Labelled(h, p, names[h].index(label)) for h, p, label in found], {h: len(n) for h, n in names.items()}


def augmented(pixels: NDArray[np.uint8], rng: random.Random, *, mirror: bool) -> NDArray[np.uint8]:
    """Shift by up to an eighth, mirror at random if `mirror`, and change the brightness by up to a fifth."""
    margin = pixels.shape[0] // 8
    padded = np.pad(pixels, ((margin, margin), (margin, margin), (0, 0)), mode="edge")
    top, left = rng.randrange(2 * margin + 1), rng.randrange(2 * margin + 1)
    crop = padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]
    if mirror and rng.random() < 0.5:
        crop = crop[:, ::-1]
    scaled: NDArray[np.uint8] = np.clip(crop * rng.uniform(0.8, 1.2), 0, 255).astype(np.uint8)
    return scaled


def tensor(pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
    """Normalize images to [-1, 1] like the image processor of `nano_vl`: (B, 3, 64, 64)."""
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1


def schedule(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linear warm-up over a twentieth of the steps, then cosine decay to 0."""
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train_tower(tower: nn.Module, folder: Path, out: Path, recipe: Recipe) -> None:
    """Train the tower as a classifier: stage 1."""
    examples, num_classes = labelled(folder)
    width = nano_vl.VISION["hidden_size"]
    heads = nn.ModuleDict({name: nn.Linear(width, classes) for name, classes in num_classes.items()})
    trained = nn.ModuleDict({"tower": tower, "readers": heads})  # the names in checkpoints
    optimizer = torch.optim.AdamW(trained.parameters(), lr=recipe.tower_lr, weight_decay=recipe.weight_decay)
    first = load_checkpoint(out / "tower.checkpoint", trained, optimizer)
    steps = recipe.tower_epochs * (len(examples) // recipe.tower_batch)
    step = first * (len(examples) // recipe.tower_batch)
    for epoch in range(first, recipe.tower_epochs):
        rng = random.Random(f"{recipe.seed} tower {epoch}")
        order = rng.sample(range(len(examples)), len(examples))
        started, correct, total = time.monotonic(), 0, 0
        for start in range(0, len(order) - recipe.tower_batch + 1, recipe.tower_batch):
            batch = [examples[i] for i in order[start : start + recipe.tower_batch]]
            pixels = tensor([augmented(e.pixels, rng, mirror=e.head == MIRRORED) for e in batch])
            for group in optimizer.param_groups:
                group["lr"] = recipe.tower_lr * schedule(step, steps)
            with torch.autocast("cpu", torch.bfloat16):
                pooled = tower(pixels).last_hidden_state.mean(1).float()
            losses = []
            for name, head in heads.items():
                indices = [i for i, e in enumerate(batch) if e.head == name]
                if indices:
                    target = torch.tensor([batch[i].label for i in indices])
                    logits = head(pooled[indices])
                    losses.append(F.cross_entropy(logits, target, reduction="sum", label_smoothing=0.05))
                    correct += int((logits.argmax(1) == target).sum())
                    total += len(indices)
            torch.autograd.backward(torch.stack(losses).sum() / len(batch))
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        save_checkpoint(out / "tower.checkpoint", trained, optimizer, epoch + 1)
        print(f"tower epoch {epoch + 1} accuracy {correct / total:.3f} {time.monotonic() - started:.0f} s", flush=True)


def taught(folder: Path, split: Any) -> list[Json]:
    """Load the records of stage 2, without those that are held back."""
    return [
        record
        for task in TAUGHT
        for record in records(folder, task, split)
        if record["meta"]["answer"] not in HELD_BACK.get(task, ())
    ]


@dataclass(frozen=True)
class Question:
    """One record, encoded."""

    ids: list[int]
    answer: int
    """Index of the completion's first token."""
    pixels: NDArray[np.uint8]
    task: str
    mirror: bool


def encoded(record: Json, tokenizer: Any) -> Question:
    """Encode a record: image tokens, prompt, completion."""
    text = record["prompt"].removeprefix("<image>")
    image = [nano_vl.IMAGE_TOKEN_ID] * nano_vl.IMAGE_TOKENS
    prompt = image + tokenizer(text, add_special_tokens=False)["input_ids"]
    completion = tokenizer(record["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    pixels = resized(Image.open(BytesIO(b64decode(record["image"]))))
    task = record["meta"]["task"]
    return Question(prompt + completion, len(prompt), pixels, task, task == "recognition")


def padded(questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
    """Pad on the right: ids and labels, (B, T) each."""
    longest = max(len(q.ids) for q in questions)
    ids = torch.tensor([q.ids + [1] * (longest - len(q.ids)) for q in questions])
    labels = torch.tensor([[-100] * q.answer + q.ids[q.answer :] + [-100] * (longest - len(q.ids)) for q in questions])
    return ids, labels


def train_answers(model: Any, folder: Path, out: Path, recipe: Recipe) -> None:
    """Train tower and projector to answer questions: stage 2."""
    tokenizer = nano_vl.tokenizer()
    questions = [encoded(record, tokenizer) for record in taught(folder, "train")]
    tower, projector = model.model.vision_tower, model.model.multi_modal_projector
    model.requires_grad_(False)
    trained = nn.ModuleDict({"tower": tower, "projector": projector}).requires_grad_(True)
    groups = [
        {"params": list(projector.parameters()), "scale": 1.0},
        {"params": list(tower.parameters()), "scale": recipe.tower_share},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.answer_lr, weight_decay=recipe.weight_decay)
    first = load_checkpoint(out / "answers.checkpoint", trained, optimizer)
    steps_per_epoch = len(questions) // recipe.answer_batch
    step = first * steps_per_epoch
    for epoch in range(first, recipe.answer_epochs):
        started, losses = time.monotonic(), []
        for batch, rng in answer_batches(questions, recipe, epoch):
            ids, labels = padded(batch)
            pixels = tensor([augmented(q.pixels, rng, mirror=q.mirror) for q in batch])
            for group in optimizer.param_groups:
                group["lr"] = recipe.answer_lr * group["scale"] * schedule(step, recipe.answer_epochs * steps_per_epoch)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, pixel_values=pixels, labels=labels).loss
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            step += 1
        save_checkpoint(out / "answers.checkpoint", trained, optimizer, epoch + 1)
        print(f"answers epoch {epoch + 1} loss {np.mean(losses):.3f} {time.monotonic() - started:.0f} s", flush=True)


def answer_batches(
    questions: Sequence[Question], recipe: Recipe, epoch: int
) -> Iterator[tuple[list[Question], random.Random]]:
    """Yield the batches of an epoch, each with the generator for augmentation; the order depends only on the seed."""
    rng = random.Random(f"{recipe.seed} answers {epoch}")
    order = rng.sample(range(len(questions)), len(questions))
    for start in range(0, len(order) - recipe.answer_batch + 1, recipe.answer_batch):
        yield [questions[i] for i in order[start : start + recipe.answer_batch]], rng


@torch.no_grad()
def accuracy(model: Any, folder: Path, tasks: Sequence[str]) -> dict[str, dict[str, float]]:
    """Fraction of exactly correct answers on test images, teacher-forced, for taught and held-back classes."""
    tokenizer = nano_vl.tokenizer()
    figures: dict[str, dict[str, float]] = {}
    for task in tasks:
        correct: dict[str, list[bool]] = {}
        for record in records(folder, task, "test"):
            question = encoded(record, tokenizer)
            ids, labels = padded([question])
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=ids, pixel_values=tensor([question.pixels])).logits[0]
            expected = labels[0, question.answer :]
            exact = bool((logits[question.answer - 1 : -1].argmax(-1) == expected).all())
            taught_class = task in TAUGHT and record["meta"]["answer"] not in HELD_BACK.get(task, ())
            correct.setdefault("taught" if taught_class else "held back", []).append(exact)
        figures[task] = {name: round(float(np.mean(each)), 3) for name, each in correct.items()}
        print(task, figures[task], flush=True)
    return figures


def save_checkpoint(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write weights and moments atomically, then the epoch."""
    tensors = {f"model.{name}": p.detach().clone() for name, p in module.named_parameters()}
    named: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
    for p, state in optimizer.state.items():
        tensors |= {f"optim.{named[p]}.{key}": value.clone() for key, value in state.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    save_file(tensors, partial, metadata={"epoch": str(epoch)})
    partial.rename(file)
    file.with_suffix(".epoch").write_text(f"{epoch}", encoding="utf-8")


def load_checkpoint(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, if there is one, and return the number of finished epochs; else 0."""
    if not file.exists():
        return 0
    tensors = load_file(file)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(tensors[f"model.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"optim.{name}.step" in tensors:
                optimizer.state[p] = {key: tensors[f"optim.{name}.{key}"] for key in keys}
    return int(file.with_suffix(".epoch").read_text(encoding="utf-8"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of image sets, see image_tasks")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the finished weights")
    arguments = parser.parse_args()
    recipe = Recipe()
    torch.manual_seed(recipe.seed)
    model = nano_vl.assemble(torch.float32, vision_weights=None)
    train_tower(model.model.vision_tower, arguments.data, arguments.out, recipe)
    train_answers(model, arguments.data, arguments.out, recipe)
    figures = accuracy(model, arguments.data, ["recognition", "digit", "colour", "shape", "presence", "absence"])
    nano_vl.save_vision_weights(model, arguments.out / nano_vl.VISION_WEIGHTS)
    written = {"recipe": asdict(recipe), "test_accuracy": figures}
    (arguments.out / "pretrain.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
