"""SuperNI task files become records."""

import gzip
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.superni import read_task

ROW = {"id": "task5-1", "task": "task5_x", "definition": "Say it.", "input": "a", "output": "b", "references": ["b"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("task5_x", "task50_y"):
        with gzip.open(tmp_path / f"{name}.train.jsonl.gz", "wb") as file:
            for number in range(3):
                file.write(orjson.dumps({**ROW, "task": name, "id": f"{name}-{number}"}) + b"\n")
    return tmp_path


def test_a_task_is_found_by_its_number_alone(folder: Path) -> None:
    """task5 is not task50; records keep the file's order and the form that the nano backbone knows."""
    records = list(read_task(folder, "task5", "train", 2))
    assert [record["meta"] for record in records] == [{"task": "task5_x", "id": f"task5_x-{n}"} for n in range(2)]
    assert records[0]["prompt"] == "Definition: Say it.\n\nInput: a\n\nOutput:"
    assert records[0]["completion"] == " b"


def test_a_missing_task_is_an_error(folder: Path) -> None:
    """The message says what was looked for."""
    with pytest.raises(FileNotFoundError, match="0 train files of task7"):
        list(read_task(folder, "task7", "train"))
