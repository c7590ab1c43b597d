"""A folder of tasks from a file of texts."""

import gzip
from pathlib import Path

import orjson
import pytest

from benchmarks.learn.splits import Draw
from benchmarks.learn.suites import of_folder
from benchmarks.task_folder import write_folder
from streamlearn.errors import UsageError


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
    suite = of_folder(tmp_path / "one", Draw([], records=5))
    assert [segment.tasks for segment in suite.segments] == [(name,) for name in names]
    for name in names:
        asked = [{record["prompt"] for record in records} for records in (suite.train[name], suite.tests[name])]
        assert len(suite.tests[name]) == 3
        assert not asked[0] & asked[1]


def test_what_does_not_fit_is_named(texts: Path, tmp_path: Path) -> None:
    """Too few tasks, and a folder that may hold something."""
    with pytest.raises(UsageError, match=r"expected 5 tasks with 5 training and 3 test records, found 4"):
        write_folder(texts, tmp_path / "new", tasks=5, records=5, tests=3, seed=0)
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match=r"exists; name a new folder"):
        write_folder(texts, tmp_path, tasks=1, records=5, tests=3, seed=0)
