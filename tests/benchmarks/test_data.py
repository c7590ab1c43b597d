"""Records from SuperNI task files, and a folder of tasks from a file of texts."""

import gzip
from pathlib import Path

import orjson
import pytest

from benchmarks.data import write_folder
from benchmarks.learn.suites import Draw, make_suite


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
