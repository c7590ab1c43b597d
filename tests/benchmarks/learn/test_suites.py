"""Suites built from task files."""

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn.splits import Draw
from benchmarks.learn.suite import Reference, Suite
from benchmarks.learn.suites import ORDER_1, SUITES, UNSEEN_1, grouped, mixed, of_folder, sequential
from benchmarks.learn.task_metrics import metric_of
from streamlearn.errors import UsageError

RECORDS, TESTS = 6, 2
TEXTS = {"definition": "Say it.", "output": " o ", "references": ["o", "p"]}


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Two folders of tiny task files, one in each layout."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    for task in ("a", "b", "c"):
        for split in ("train", "test"):
            rows = [{"id": f"{task}{i}", "task": task, "input": f"{task} {split} {i}", **TEXTS} for i in range(8)]
            write(first / f"{task}.{split}.jsonl.gz", rows)
    for split in ("train", "test"):
        rows = [{"id": f"t{i}", "task": "t", "prompt": f"t {split} {i}", "answer": "o"} for i in range(8)]
        write(second / f"t.{split}.jsonl.gz", rows)
    return [first, second]


def write(file: Path, rows: list[dict[str, Any]]) -> None:
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


def test_a_mixed_suite_has_all_tasks_from_the_first_record_on(folders: list[Path]) -> None:
    """One segment, in no order of tasks."""
    [segment] = mixed(Draw(folders, RECORDS, 1), ["a", "b", "c", "t"]).segments
    names = [record["meta"]["task"] for record in segment.records]
    assert sorted(names) == sorted(segment.tasks * RECORDS)
    assert names != sorted(names)


def test_every_record_has_its_references(folders: list[Path]) -> None:
    """All of them, without space around; unseen tasks have training records that are not in the stream."""
    suite = sequential("two", Draw(folders, RECORDS, TESTS), ["a"], ["t"])
    assert suite.references == {"a": (Reference(("o", "p")),) * TESTS, "t": (Reference(("o",)),) * TESTS}
    assert suite.segments[0].records == suite.train["a"]
    assert len(suite.train["t"]) == len(suite.train_references["t"]) == RECORDS
    assert suite.tests["a"][0]["completion"] == " o"


def test_what_scores_a_task_does_not_depend_on_the_draw(tmp_path: Path) -> None:
    """A draw of six may show a label or none; all answers that may be drawn decide."""
    answers = ["yes", "no"] * 20 + [f"perhaps {i}" for i in range(30)]
    rows = [{"id": f"{i}", "task": "x", "prompt": f"{i}?", "answer": each} for i, each in enumerate(answers)]
    for split in ("train", "test"):
        write(tmp_path / f"x.{split}.jsonl.gz", rows)
    found = {seed: of_folder(tmp_path, Draw([], 6, 1, seed)) for seed in range(40)}
    assert {suite.metrics["x"] for suite in found.values()} == {"rouge_l"}
    drawn = [[reference.answers[0] for reference in suite.train_references["x"]] for suite in found.values()]
    assert {metric_of("x", answers) for answers in drawn} == {"exact_match", "rouge_l"}, "draws alone would differ"


def test_development_records_come_from_the_training_file(folders: list[Path]) -> None:
    """What the draw leaves over, and never in the stream."""
    suite = sequential("one", Draw(folders, RECORDS, 50, split="development"), ["a"])
    assert (suite.split, len(suite.tests["a"])) == ("development", 8 - RECORDS)
    assert all("train" in record["prompt"] for record in suite.tests["a"])
    assert not {r["prompt"] for r in suite.tests["a"]} & {r["prompt"] for r in suite.segments[0].records}


def test_a_draw_that_leaves_nothing_to_score_is_an_error(folders: list[Path]) -> None:
    """Before anything is trained."""
    with pytest.raises(UsageError, match="a: no development records are left beside 8 training records: lower"):
        sequential("one", Draw(folders, 8, 50, split="development"), ["a"])


@pytest.mark.parametrize(
    ("task", "bare", "question"),
    [("a", False, "Say it.\n\na test 0"), ("a", True, "a test 0"), ("t", True, "t test 0")],
)
def test_chat_has_two_messages(folders: list[Path], task: str, bare: bool, question: str) -> None:
    """The user's has definition and input without a cue, the assistant's the answer."""
    suite = sequential("one", Draw(folders, RECORDS, TESTS, prompts="chat"), [task], bare=bare)
    assert suite.tests[task][0]["messages"] == [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "o"},
    ]


def test_bare_prompts_have_no_definition(folders: list[Path]) -> None:
    """Only the input and the cue are left."""
    suite = sequential("one", Draw(folders, RECORDS, TESTS), ["a"], bare=True)
    assert suite.tests["a"][0]["prompt"] == "Input: a test 0\n\nOutput:"


def test_the_text_to_simplify_is_the_source(tmp_path: Path) -> None:
    """It stands between the instruction and the cue."""
    prompt = "Provide a simplified version.\n\nParagraph:\nOne.\n\nTwo.\n\nSimplification:"
    row = {"id": "1", "task": "20Minuten", "prompt": prompt, "answer": "One."}
    for split in ("train", "test"):
        write(tmp_path / f"20Minuten.{split}.jsonl.gz", [row])
    suite = sequential("one", Draw([tmp_path], 1, 1), ["20Minuten"])
    assert suite.references["20Minuten"] == (Reference(("One.",), "One.\n\nTwo."),)


@pytest.fixture
def order_1(tmp_path: Path) -> list[Path]:
    """Files of the fifteen tasks of `superni-1`."""
    for task in (*ORDER_1, *UNSEEN_1):
        for split in ("train", "test"):
            rows = [{"id": f"{i}", "task": task, "input": f"{task} {split} {i}", **TEXTS} for i in range(12)]
            write(tmp_path / f"{task}_x.{split}.jsonl.gz", rows)
    return [tmp_path]


@pytest.mark.parametrize("name", ["superni-1", "superni-1-bare", "recurring", "interleaved", "grouped", "mixed"])
@pytest.mark.parametrize("split", ["development", "test"])
def test_a_named_suite_streams_every_training_record_once(order_1: list[Path], name: str, split: Any) -> None:
    """Everything seen is evaluated at the end only; every task has scored records with references."""
    suite: Suite = SUITES[name](Draw(order_1, RECORDS, TESTS, split=split))
    assert (suite.name, suite.split, suite.checkpoints) == (name, split, frozenset())
    streamed = [record["prompt"] for segment in suite.segments for record in segment.records]
    assert len(set(streamed)) == len(streamed)
    trained = [record["prompt"] for task in suite.ends for record in suite.train[task]]
    assert sorted(streamed) == sorted(trained)
    assert [*suite.tests] == [*suite.train] == [*suite.references] == [*suite.ends, *suite.unseen]
    assert {len(records) for records in suite.tests.values()} == {TESTS}
    assert any("Definition" in prompt for prompt in streamed) == (name != "superni-1-bare")
