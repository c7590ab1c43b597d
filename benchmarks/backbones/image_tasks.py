"""Questions about images as records, for pretraining and measuring the bundled image-text backbone.

    python -m benchmarks.backbones.image_tasks --data FOLDER --task colour --split train

A folder holds `cifar10.npz`, `mnist.npz`, `omniglot100.npz` (`train_images`, `train_labels`, `test_images`,
`test_labels`, `label_names`), and `easy_vqa` and `coco256` as `NAME_images.tar` with `NAME.train.jsonl.gz` and
`NAME.test.jsonl.gz`. Each task is one kind of question, similar to the question types of VQA v2 (CP-MoE, arXiv
2605.20247, Table 2):

| task | images | question | answer |
|---|---|---|---|
| recognition | CIFAR-10 | What is this a photo of? | ten classes |
| digit | MNIST | Which digit is this? | 0 to 9 |
| alphabet | Omniglot | From which alphabet is this letter? | eight alphabets |
| colour | easy-VQA | what color is the shape? and similar | eight colors |
| shape | easy-VQA | what shape is present? and similar | three shapes |
| presence | easy-VQA | is there a red shape? and similar | yes, no |
| absence | easy-VQA | is there not a circle? and similar | yes, no |
| counting | COCO | How many OBJECTs are in the photo? | a number |
| objects | COCO | What is in the photo? | names, most frequent first |
"""

import argparse
import base64
import gzip
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from PIL import Image

Split = Literal["train", "test"]
Json = dict[str, Any]


def records(folder: Path, task: str, split: Split, limit: int | None = None) -> Iterator[Json]:
    """Yield the records of one task: `prompt`, `completion`, `image`, and `meta` with the task and the answer.

    Raises:
        FileNotFoundError: the folder lacks the task's files.
    """
    return islice(TASKS[task](folder, task, split), limit)


def record(task: str, question: str, answer: str, image: bytes) -> Json:
    """Build a record in the format of the bundled backbone's pretraining."""
    return {
        "prompt": f"<image>\nQuestion: {question}\n\nOutput:",
        "completion": f" {answer}",
        "image": base64.b64encode(image).decode(),
        "meta": {"task": task, "answer": answer},
    }


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode an array (H, W) or (H, W, 3) as PNG."""
    out = BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def arrays(folder: Path, name: str, split: Split) -> Iterator[tuple[NDArray[np.uint8], str]]:
    """Yield pixels and label of each image in an .npz set."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as held:
        names = [str(label) for label in held["label_names"]]
        for pixels, label in zip(held[f"{split}_images"], held[f"{split}_labels"], strict=True):
            yield pixels, names[label]


def rows(folder: Path, name: str, split: Split) -> Iterator[tuple[Json, bytes]]:
    """Yield row and image bytes of each row in a .tar set."""
    with tarfile.open(folder / f"{name}_images.tar") as tar:
        images = {member.name: content.read() for member in tar if (content := tar.extractfile(member)) is not None}
    with gzip.open(folder / f"{name}.{split}.jsonl.gz") as lines:
        for line in lines:
            row = orjson.loads(line)
            yield row, images[row["image"]]


def easy_vqa_kind(question: str) -> str:
    """Return the task of an easy-VQA question."""
    if question.startswith("what"):
        return "colour" if "color" in question else "shape"
    terms = question.split()
    return "absence" if "not" in terms or "no" in terms else "presence"


def _recognition(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for pixels, label in arrays(folder, "cifar10", split):
        yield record(task, "What is this a photo of?", label, png(pixels))


def _digit(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for pixels, label in arrays(folder, "mnist", split):
        yield record(task, "Which digit is this?", label, png(pixels))


def _alphabet(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for pixels, label in arrays(folder, "omniglot100", split):
        name = label.split("/")[0].replace("_", " ")
        yield record(task, "From which alphabet is this letter?", name, png(pixels))


def _easy_vqa(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for row, image in rows(folder, "easy_vqa", split):
        if easy_vqa_kind(row["question"]) == task:
            yield record(task, row["question"], row["answer"], image)


def _counting(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for row, image in rows(folder, "coco256", split):
        for name, count in row["objects"].items():
            yield record(task, f"How many {name}s are in the photo?", f"{count}", image)


def _objects(folder: Path, task: str, split: Split) -> Iterator[Json]:
    for row, image in rows(folder, "coco256", split):
        if row["objects"]:
            names = sorted(row["objects"], key=lambda name: (-row["objects"][name], name))
            yield record(task, "What is in the photo?", ", ".join(names[:3]), image)


TASKS: Mapping[str, Callable[[Path, str, Split], Iterator[Json]]] = {
    "recognition": _recognition,
    "digit": _digit,
    "alphabet": _alphabet,
    "colour": _easy_vqa,
    "shape": _easy_vqa,
    "presence": _easy_vqa,
    "absence": _easy_vqa,
    "counting": _counting,
    "objects": _objects,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of image sets")
    parser.add_argument(
        "--task", choices=list(TASKS), nargs="+", required=True, help="tasks, in the order in which they are written"
    )
    parser.add_argument("--split", choices=["train", "test"], default="train")
    parser.add_argument("--limit", type=int, default=None, help="maximum records per task; default: all")
    arguments = parser.parse_args()
    for task in arguments.task:
        for question in records(arguments.data, task, arguments.split, arguments.limit):
            sys.stdout.buffer.write(orjson.dumps(question, option=orjson.OPT_APPEND_NEWLINE))


if __name__ == "__main__":
    main()
