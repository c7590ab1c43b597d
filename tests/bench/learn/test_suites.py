"""Suites built from task files."""

import gzip
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.learn.suites import Draw, grouped, sequential

RECORDS, TESTS = 6, 2


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders of tiny task files, one in each layout."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    for task in ("a", "b", "c"):
        for split in ("train", "test"):
            rows = [
                {"id": f"{task}{i}", "task": task, "definition": "d", "input": f"{task} {split} {i}", "output": "o"}
                for i in range(8)
            ]
            write(first / f"{task}.{split}.jsonl.gz", rows)
    for split in ("train", "test"):
        rows = [{"id": f"t{i}", "task": "t", "prompt": f"t {split} {i}", "answer": "o"} for i in range(8)]
        write(second / f"t.{split}.jsonl.gz", rows)
    return [first, second]


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_bytes(gzip.compress(b"".join(orjson.dumps(row) + b"\n" for row in rows)))


def test_a_sequential_suite_is_one_task_after_another(folders: list[Path]) -> None:
    """Segments have the given length and come from the training files; tests come from the test files."""
    suite = sequential("three", Draw(folders, RECORDS, TESTS, 1), ["b", "t", "a"])
    assert [segment.tasks for segment in suite.segments] == [("b",), ("t",), ("a",)]
    assert suite.boundaries == [RECORDS, 2 * RECORDS]
    for segment in suite.segments:
        assert {record["meta"]["task"] for record in segment.records} == set(segment.tasks)
        assert len({record["meta"]["id"] for record in segment.records}) == RECORDS
        assert all("train" in record["prompt"] for record in segment.records)
    assert all(len(tests) == TESTS and all("test" in r["prompt"] for r in tests) for tests in suite.tests.values())


def test_the_seed_determines_the_draw(folders: list[Path]) -> None:
    """The same seed gives the same stream, another seed another."""
    one, two, other = (sequential("two", Draw(folders, RECORDS, 1, seed), ["a", "t"]) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_a_grouped_suite_mixes_two_and_three_at_a_time(folders: list[Path]) -> None:
    """Every record appears once, and each segment is a mixture of its tasks."""
    suite = grouped(Draw(folders, RECORDS, 1), ["a", "b", "c", "t"])
    assert [segment.tasks for segment in suite.segments] == [("a", "b"), ("c", "t")]
    for segment in suite.segments:
        names = [record["meta"]["task"] for record in segment.records]
        assert sorted(names) == sorted(segment.tasks * RECORDS)
        assert names != sorted(names)
