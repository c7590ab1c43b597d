"""Suites: splits are disjoint, streams are what their names say, long records are shortened."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn.suites import (
    DEVELOPMENT,
    GAP,
    ORDER_1,
    UNSEEN_1,
    Draw,
    Suite,
    TaskSegment,
    divide,
    make_suite,
    sequential,
    shortened,
)
from streamlearn.errors import UsageError
from tests.benchmarks.learn.kit import LetterDecoder, record, task_of

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
    assert all(len(own.scored) == TESTS for own in suite.tasks.values())
    assert all("test" in r["prompt"] for own in suite.tasks.values() for r in own.scored)


def test_development_records_come_from_the_training_file(folders: list[Path]) -> None:
    """What the draw leaves over, and never in the stream."""
    suite = sequential("one", Draw(folders, RECORDS, 50, split="development"), ["a"])
    assert (suite.split, len(suite.tasks["a"].scored)) == ("development", 8 - RECORDS)
    assert all("train" in record["prompt"] for record in suite.tasks["a"].scored)
    assert not {r["prompt"] for r in suite.tasks["a"].scored} & {r["prompt"] for r in suite.segments[0].records}


@pytest.fixture
def order_1(tmp_path: Path) -> list[Path]:
    """Files of the fifteen tasks of `superni-1`."""
    for task in (*ORDER_1, *UNSEEN_1):
        for split in ("train", "test"):
            rows = [{"id": f"{i}", "task": task, "input": f"{task} {split} {i}", **TEXTS} for i in range(12)]
            write(tmp_path / f"{task}_x.{split}.jsonl.gz", rows)
    return [tmp_path]


@pytest.mark.parametrize("name", ["superni-1", "superni-1-bare", "grouped", "mixed"])
@pytest.mark.parametrize("split", ["development", "test"])
def test_a_named_suite_streams_every_training_record_once(order_1: list[Path], name: str, split: Any) -> None:
    """Everything seen is evaluated at the end only; no scored record is trained on."""
    suite = make_suite(name, Draw(order_1, RECORDS, TESTS, split=split))
    assert (suite.name, suite.split, suite.checkpoints) == (name, split, frozenset())
    streamed = [row["prompt"] for segment in suite.segments for row in segment.records]
    assert len(set(streamed)) == len(streamed)
    assert sorted(streamed) == sorted(row["prompt"] for task in suite.ends for row in suite.tasks[task].train)
    assert [*suite.tasks] == [*suite.ends, *suite.unseen]
    assert {len(own.scored) for own in suite.tasks.values()} == {TESTS}
    assert not {row["prompt"] for own in suite.tasks.values() for row in own.scored} & set(streamed)
    assert any("Definition" in prompt for prompt in streamed) == (name != "superni-1-bare")


REPOSITORIES = ("a/a", "b/b", "c/c")


@pytest.fixture
def natural(tmp_path: Path) -> list[Path]:
    """Commits in the order of their time: a/a stops early, b/b and c/c take turns."""
    train = ["a/a"] * 20 + ["b/b", "c/c", "c/c"] * 20
    for form in ("told", "bare"):
        for split, writers in (("train", train), ("test", ["a/a", "b/b", "c/c"])):
            rows = [
                {
                    "prompt": f"{form} {split} {i}\n",
                    "completion": f"subject {i}",
                    "meta": {"repo": repository, "time": 1000 + i},
                }
                for i, repository in enumerate(writers)
            ]
            write(tmp_path / f"commits.{form}.{split}.jsonl.gz", rows)
    return [tmp_path]


@pytest.mark.parametrize("split", ["development", "test"])
def test_commits_come_in_the_order_of_their_time(natural: list[Path], split: Any) -> None:
    """All of a repository or a draw of it, cut into segments of equal length; no scored record is trained on."""
    for records in (100, 10):
        suite = make_suite("commits-bare", Draw(natural, records, 50, seed=1, split=split))
        streamed = [row for segment in suite.segments for row in segment.records]
        places = [int(row["meta"]["id"]) for row in streamed]
        assert places == sorted(set(places))
        assert {segment.tasks for segment in suite.segments} == {REPOSITORIES}
        assert len({len(segment.records) for segment in suite.segments}) <= 2
        counts = Counter(suite.record_tasks)
        assert max(counts.values()) <= records
        assert sum(counts.values()) == (70 if records == 100 else 30), "every eighth record is a development record"
        assert not {row["prompt"] for own in suite.tasks.values() for row in own.scored} & {
            row["prompt"] for row in streamed
        }
        assert all("bare train" in row["prompt"] and row["completion"].startswith("subject") for row in streamed)
    assert sum(len(own.scored) for own in suite.tasks.values()) == (10 if split == "development" else 3)


def test_repositories_exchange_their_timelines(natural: list[Path]) -> None:
    """With order 1, c/c is on the timeline of a/a and stops early; each keeps its own order."""
    suite = make_suite("commits-order-1", Draw(natural, 10, 50))
    tasks = suite.record_tasks
    assert suite.name == "commits-order-1"
    assert tasks[:10] == ["c/c"] * 10
    assert set(tasks[10:]) == {"a/a", "b/b"}
    for repository in REPOSITORIES:
        own = [int(r["meta"]["id"]) for s in suite.segments for r in s.records if r["meta"]["task"] == repository]
        assert own == sorted(own)


def test_a_record_of_an_uncut_stream_has_the_regime_of_its_task(natural: list[Path]) -> None:
    """One slot for each repository, not for each segment."""
    suite = make_suite("commits", Draw(natural, 10, 50, prompts="chat"))
    slots, by_task = suite.regime_slots()
    assert by_task == {"a/a": 0, "b/b": 1, "c/c": 2}
    assert [by_task[task] for task in suite.record_tasks] == [slot for own in slots for slot in own]
    assert all("messages" in record for segment in suite.segments for record in segment.records)


def test_commits_need_their_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="commits"):
        make_suite("commits", Draw([tmp_path]))


ROWS = [f"row {i}" for i in range(200)]


@pytest.mark.parametrize(
    ("rows", "records", "expected"), [(200, 100, DEVELOPMENT), (120, 100, 20), (100, 100, 12), (60, 100, 7)]
)
def test_training_records_go_before_all_but_an_eighth_of_development_records(
    rows: int, records: int, expected: int
) -> None:
    """A small file keeps enough to draw from; a larger draw leaves fewer of the same development records."""
    pool, development = divide(ROWS[:rows], records, str)
    assert len(development) == expected
    assert sorted([*pool, *development]) == sorted(ROWS[:rows])
    assert divide(ROWS, 170, str)[1] == divide(ROWS, 100, str)[1][-30:]


def test_an_input_of_a_development_record_is_not_trained_on() -> None:
    """Two rows with one input are never on both sides."""
    rows = [(f"input {i % 150}", i) for i in range(200)]
    pool, development = divide(rows, 100, lambda row: row[0])
    assert len(development) == DEVELOPMENT
    assert not {text for text, _ in pool} & {text for text, _ in development}


LONG = "Instruction: " + "x" * 300 + " Answer:"
LIMIT = 100


def chat(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def short(train: list[dict[str, Any]], scored: list[dict[str, Any]]) -> Suite:
    suite = Suite("s", (TaskSegment(("t",), tuple(train)),), {"t": task_of(train, scored)})
    return shortened(suite, LetterDecoder(), LIMIT)


@pytest.mark.parametrize("form", [record, chat])
def test_head_and_tail_of_a_prompt_stay(form: Any) -> None:
    """The whole record fits, and the prompt's length says nothing about its own answer."""
    train = [form(LONG, "long answer"), form("short", "a")]
    suite = short(train, [form(LONG, "a"), form(LONG, "an answer")])
    decoder = LetterDecoder()
    scored = [decoder.decode_value(row) for row in suite.tasks["t"].scored]
    assert all(len(decoder.decode_value(row)) <= LIMIT for row in suite.segments[0].records)
    assert {example.prompt_length for example in scored} == {LIMIT - len("long answer")}
    text = decoder.text(scored[0].input_ids.tolist())
    assert text.startswith("Instruction: ")
    assert GAP in text
    assert text.endswith(" Answer:a")
    assert suite.segments[0].records[1] is train[1]
    assert suite.tasks["t"].train == suite.segments[0].records
