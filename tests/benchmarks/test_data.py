"""Records from SuperNI task files, and a folder of tasks from a file of texts."""

import gzip
from pathlib import Path

import orjson
import pytest

from benchmarks.data import read_task, write_folder
from benchmarks.learn.suites import Draw, make_suite
from streamlearn.errors import UsageError

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


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Four tasks of 12 records, every third of which asks the same as the one before it; one of 4."""
    file = tmp_path / "texts.jsonl.gz"
    with gzip.open(file, "wb") as lines:
        for task, number in (("a", 12), ("b", 12), ("c", 12), ("d", 12), ("few", 4)):
            for i in range(number):
                text = f"Definition: {task}.\n\nInput: question {i - (i % 3 == 2)}\n\nOutput: {i}"
                lines.write(orjson.dumps({"text": text, "source": f"superni:{task}"}) + b"\n")
    return file


def test_the_folder_is_a_suite_in_the_drawn_order(texts: Path, tmp_path: Path) -> None:
    """Test questions are not trained on; the same seed draws the same."""
    names = write_folder(texts, tmp_path / "one", tasks=3, records=5, tests=3, seed=4)
    assert names == write_folder(texts, tmp_path / "two", tasks=3, records=5, tests=3, seed=4)
    assert names != write_folder(texts, tmp_path / "three", tasks=3, records=5, tests=3, seed=5)
    suite = make_suite(str(tmp_path / "one"), Draw([], records=5))
    assert [segment.tasks for segment in suite.segments] == [(name,) for name in names]
    for name in names:
        asked = [
            {record["prompt"] for record in records} for records in (suite.tasks[name].train, suite.tasks[name].scored)
        ]
        assert len(suite.tasks[name].scored) == 3
        assert not asked[0] & asked[1]


def test_what_does_not_fit_is_named(texts: Path, tmp_path: Path) -> None:
    """Too few tasks, and a folder that may hold something."""
    with pytest.raises(UsageError, match=r"expected 5 tasks with 5 training and 3 test records, found 4"):
        write_folder(texts, tmp_path / "new", tasks=5, records=5, tests=3, seed=0)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"exists; name a new folder"):
        write_folder(texts, tmp_path, tasks=1, records=5, tests=3, seed=0)
