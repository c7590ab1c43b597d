"""Questions about images, read from small files in the documented layout."""

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

from benchmarks.backbones.image_tasks import TASKS, easy_vqa_kind, png, records
from benchmarks.learn.suites import Draw, make_suite
from streamlearn.errors import UsageError

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
