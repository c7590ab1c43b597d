"""Pre-training of the bundled backbones, and their image tasks."""

import base64
import gzip
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from benchmarks.backbones import pretrain_vision
from benchmarks.backbones.image_tasks import TASKS, png, records
from benchmarks.backbones.pretrain_vision import HELD_BACK
from benchmarks.learn.suites import Draw, make_suite
from streamlearn.errors import UsageError


def test_held_back_classes_are_not_taught(folder: Path) -> None:
    """Neither stage reads them, nor tasks that are not taught."""
    held_back = {answer for answers in HELD_BACK.values() for answer in answers}
    records = pretrain_vision.taught(folder, "train")
    assert {record["meta"]["task"] for record in records} <= set(pretrain_vision.TAUGHT)
    assert not held_back & {record["meta"]["answer"] for record in records}
    images, num_classes = pretrain_vision.labeled(folder)
    assert num_classes == {"cifar10": 2, "mnist": 2, "omniglot100": 2, "colour": 1, "shape": 1}
    assert all(image.label < num_classes[image.head] for image in images)


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


ANSWERS = {
    "recognition": [" cat", " dog", " dog", " cat"],
    "digit": [" 0", " 1", " 1", " 0"],
    "alphabet": [" Old Greek", " Latin", " Latin", " Old Greek"],
    "colour": [" red", " red"],
    "shape": [" circle"],
    "presence": [" yes", " no"],
    "absence": [" no", " no"],
    "counting": [" 1", " 3"],
    "objects": [" dog, cup"],
}


def test_every_task_has_questions_and_answers(folder: Path) -> None:
    """Prompts contain the placeholder; the image is a complete file of the requested split."""
    assert ANSWERS.keys() == TASKS.keys()
    for task, answers in ANSWERS.items():
        questions = list(records(folder, task, "test"))
        assert [question["completion"] for question in questions] == answers
        for question in questions:
            assert question["prompt"].startswith("<image>\nQuestion: ")
            image = Image.open(BytesIO(base64.b64decode(question["image"])))
            assert image.size == (8, 8)
            if task in ("colour", "counting"):
                assert image.getpixel((0, 0)) == (9, 9, 9)


def test_the_suite_has_one_task_after_another(folder: Path) -> None:
    """On the image-text backbone; without the folder the message says what is missing."""
    suite = make_suite("images", Draw([folder.parent, folder], records=2, evaluated=1, seed=0))
    assert [stretch.tasks for stretch in suite.segments] == [(task,) for task in TASKS]
    assert max(len(stretch.records) for stretch in suite.segments) == 2
    assert all(len(own.scored) == 1 for own in suite.tasks.values())
    assert suite.backbone == "builtin:nano-vl"
    with pytest.raises(UsageError, match="image sets"):
        make_suite("images", Draw([folder.parent], records=2))
