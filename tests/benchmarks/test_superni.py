"""Records from SuperNI task files."""

import gzip
from pathlib import Path

import orjson
import pytest

from benchmarks.superni import read_task

ROW = {"id": "task5-1", "task": "task5_x", "definition": "Say it.", "input": "a", "output": "b", "references": ["b"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("task5_x", "task50_y"):
        with gzip.open(tmp_path / f"{name}.train.jsonl.gz", "wb") as file:
            for number in range(3):
                file.write(orjson.dumps({**ROW, "task": name, "id": f"{name}-{number}"}) + b"\n")
    return tmp_path


def test_a_task_is_found_by_its_number(folder: Path) -> None:
    """task5 is not task50; records keep the order of the file and have the nano backbone's format."""
    records = list(read_task(folder, "task5", "train", 2))
    assert [record["meta"] for record in records] == [{"task": "task5_x", "id": f"task5_x-{n}"} for n in range(2)]
    assert records[0]["prompt"] == "Definition: Say it.\n\nInput: a\n\nOutput:"
    assert records[0]["completion"] == " b"


def test_a_missing_task_is_an_error(folder: Path) -> None:
    """The message has the split and the task."""
    with pytest.raises(FileNotFoundError, match="expected exactly one train file of task7, found 0"):
        list(read_task(folder, "task7", "train"))
