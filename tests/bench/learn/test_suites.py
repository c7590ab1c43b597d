import gzip
from pathlib import Path

import orjson
import pytest

from streamlearn.bench.learn.scores import scores
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
    """Stretches of the wanted length, drawn from the training file; tests from the test file; boundaries between."""
    suite = sequential("three", Draw(folders, RECORDS, TESTS, 1), ["b", "t", "a"])
    assert [stretch.tasks for stretch in suite.stretches] == [("b",), ("t",), ("a",)]
    assert suite.boundaries == [RECORDS, 2 * RECORDS]
    for stretch in suite.stretches:
        assert {record["meta"]["task"] for record in stretch.records} == set(stretch.tasks)
        assert len({record["meta"]["id"] for record in stretch.records}) == RECORDS
        assert all("train" in record["prompt"] for record in stretch.records)
    assert all(len(tests) == TESTS and all("test" in r["prompt"] for r in tests) for tests in suite.tests.values())


def test_the_draw_is_the_seeds(folders: list[Path]) -> None:
    """The same seed gives the same stream, another seed another."""
    one, two, other = (sequential("two", Draw(folders, RECORDS, 1, seed), ["a", "t"]) for seed in (1, 1, 2))
    assert one == two
    assert one != other


def test_a_grouped_suite_mixes_two_and_three_at_a_time(folders: list[Path]) -> None:
    """Every record once, each stretch a mixture of its tasks."""
    suite = grouped(Draw(folders, RECORDS, 1), ["a", "b", "c", "t"])
    assert [stretch.tasks for stretch in suite.stretches] == [("a", "b"), ("c", "t")]
    for stretch in suite.stretches:
        names = [record["meta"]["task"] for record in stretch.records]
        assert sorted(names) == sorted(stretch.tasks * RECORDS)
        assert names != sorted(names)


def test_the_figures_are_those_of_their_equations() -> None:
    """A matrix by hand: c is the last stretch, so a and b are what can be forgotten."""
    matrix = [{"a": 0.5}, {"a": 0.75, "b": 0.5}, {"a": 0.25, "b": 0.625, "c": 1.0}]
    found = scores(matrix, [["a"], ["b"], ["c"]])
    assert pytest.approx((0.25 + 0.625 + 1.0) / 3) == found.AP
    assert pytest.approx((0.5 + 0.0) / 2) == found.AF
    assert pytest.approx((-0.25 + 0.125) / 2) == found.BWT
