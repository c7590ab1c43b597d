"""Suites: splits are disjoint, streams are what their names say, long records are shortened."""

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from benchmarks.learn.scores import Reference, metric_of
from benchmarks.learn.suites import (
    DEVELOPMENT,
    GAP,
    ORDER_1,
    UNSEEN_1,
    Draw,
    Suite,
    TaskSegment,
    divide,
    grouped,
    make_suite,
    sequential,
    shortened,
)
from streamlearn.errors import UsageError
from streamlearn.settings import LearnerSettings
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


def test_every_record_has_its_references(folders: list[Path]) -> None:
    """All of them, without space around; unseen tasks have training records that are not in the stream."""
    suite = sequential("two", Draw(folders, RECORDS, TESTS), ["a"], ["t"])
    assert suite.tasks["a"].references == (Reference(("o", "p")),) * TESTS
    assert suite.tasks["t"].references == (Reference(("o",)),) * TESTS
    assert suite.segments[0].records == suite.tasks["a"].train
    assert len(suite.tasks["t"].train) == len(suite.tasks["t"].train_references) == RECORDS
    assert suite.tasks["a"].scored[0]["completion"] == " o"


def test_what_scores_a_task_does_not_depend_on_the_draw(tmp_path: Path) -> None:
    """A draw of six may show a label or none; all answers that may be drawn decide."""
    answers = ["yes", "no"] * 20 + [f"perhaps {i}" for i in range(30)]
    rows = [{"id": f"{i}", "task": "x", "prompt": f"{i}?", "answer": answer} for i, answer in enumerate(answers)]
    for split in ("train", "test"):
        write(tmp_path / f"x.{split}.jsonl.gz", rows)
    found = {seed: make_suite(str(tmp_path), Draw([], 6, 1, seed)) for seed in range(40)}
    assert {suite.tasks["x"].metric for suite in found.values()} == {"rouge_l"}
    drawn = [[reference.answers[0] for reference in suite.tasks["x"].train_references] for suite in found.values()]
    assert {metric_of("x", answers) for answers in drawn} == {"exact_match", "rouge_l"}, "draws alone would differ"


def test_development_records_come_from_the_training_file(folders: list[Path]) -> None:
    """What the draw leaves over, and never in the stream."""
    suite = sequential("one", Draw(folders, RECORDS, 50, split="development"), ["a"])
    assert (suite.split, len(suite.tasks["a"].scored)) == ("development", 8 - RECORDS)
    assert all("train" in record["prompt"] for record in suite.tasks["a"].scored)
    assert not {r["prompt"] for r in suite.tasks["a"].scored} & {r["prompt"] for r in suite.segments[0].records}


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
    assert suite.tasks[task].scored[0]["messages"] == [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "o"},
    ]


def test_bare_prompts_have_no_definition(folders: list[Path]) -> None:
    """Only the input and the cue are left."""
    suite = sequential("one", Draw(folders, RECORDS, TESTS), ["a"], bare=True)
    assert suite.tasks["a"].scored[0]["prompt"] == "Input: a test 0\n\nOutput:"


def test_the_text_to_simplify_is_the_source(tmp_path: Path) -> None:
    """It stands between the instruction and the cue."""
    prompt = "Provide a simplified version.\n\nParagraph:\nOne.\n\nTwo.\n\nSimplification:"
    row = {"id": "1", "task": "20Minuten", "prompt": prompt, "answer": "One."}
    for split in ("train", "test"):
        write(tmp_path / f"20Minuten.{split}.jsonl.gz", [row])
    suite = sequential("one", Draw([tmp_path], 1, 1), ["20Minuten"])
    assert suite.tasks["20Minuten"].references == (Reference(("One.",), "One.\n\nTwo."),)


@pytest.fixture
def order_1(tmp_path: Path) -> list[Path]:
    """Files of the fifteen tasks of `superni-1`."""
    for task in (*ORDER_1, *UNSEEN_1):
        for split in ("train", "test"):
            rows = [{"id": f"{i}", "task": task, "input": f"{task} {split} {i}", **TEXTS} for i in range(12)]
            write(tmp_path / f"{task}_x.{split}.jsonl.gz", rows)
    return [tmp_path]


@pytest.mark.parametrize("name", ["superni-1", "superni-1-bare", "recurring", "grouped", "mixed"])
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


ROWS = [f"row {i}" for i in range(200)]


@pytest.mark.parametrize(
    ("rows", "records", "expected"), [(200, 100, DEVELOPMENT), (120, 100, 20), (100, 100, 0), (60, 100, 0)]
)
def test_training_records_go_before_development_records(rows: int, records: int, expected: int) -> None:
    """A small file keeps enough to draw from; a larger draw leaves fewer of the same development records."""
    pool, development = divide(ROWS[:rows], records, str)
    assert len(development) == expected
    assert sorted([*pool, *development]) == sorted(ROWS[:rows])
    assert divide(ROWS, 180, str)[1] == divide(ROWS, 100, str)[1][-20:]


def test_an_input_of_a_development_record_is_not_trained_on() -> None:
    """Two rows with one input are never on both sides."""
    rows = [(f"input {i % 150}", i) for i in range(200)]
    pool, development = divide(rows, 100, lambda row: row[0])
    assert len(development) == DEVELOPMENT
    assert not {text for text, _ in pool} & {text for text, _ in development}


def in_order(*tasks: str) -> Suite:
    return Suite(
        "s",
        tuple(TaskSegment((t,), tuple({"text": f"{t} {n} {i}"} for i in range(4))) for n, t in enumerate(tasks)),
        {},
    )


def test_equal_tasks_share_a_slot() -> None:
    """A task that returns has its earlier slot."""
    assert in_order("a", "b", "a").regime_slots() == ([0, 1, 0], {"a": 0, "b": 1})


def test_shuffling_keeps_lengths_and_records() -> None:
    """The seed determines the order; segments mix the tasks."""
    suite = in_order("a", "b", "a")
    one, two, other = (suite.shuffled(seed) for seed in (0, 0, "0 1"))
    assert one == two
    assert one != other
    assert [len(segment.records) for segment in one] == [4, 4, 4]
    records = [row["text"] for segment in suite.segments for row in segment.records]
    assert sorted(row["text"] for segment in one for row in segment.records) == sorted(records)


def test_tasks_with_labels_and_texts_get_different_types() -> None:
    """The type follows the record's task, also in a mixture; scored records get none."""
    mood = {"prompt": "?", "completion": "good", "meta": {"task": "mood"}}
    tale = {"prompt": "?", "completion": "once", "meta": {"task": "tale"}}
    tasks = {"mood": task_of([mood], [mood]), "tale": task_of([tale], metric="rouge_l")}
    suite = Suite("s", (TaskSegment(("mood", "tale"), (tale, mood, {"text": "of no task"})),), tasks)
    typed = suite.with_sample_types(LearnerSettings(sample_types=("label", "text")))
    assert [row.get("sample_type") for row in typed.segments[0].records] == ["text", "label", None]
    assert typed.tasks == suite.tasks


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


def test_an_answer_without_space_loses_its_end() -> None:
    """At most a quarter of the tokens is kept free for it; a short prompt leaves more."""
    (row,) = short([record(LONG, "y" * 200)], []).tasks["t"].train
    assert len(row["prompt"]) == LIMIT * 3 // 4
    assert row["completion"] == "y" * (LIMIT // 4)
    assert short([record("?", "y" * 90)], []).tasks["t"].train[0]["completion"] == "y" * 90


def test_records_with_images_stay_as_they_are() -> None:
    """Their placeholders are no text to cut."""
    row = {**record(LONG, "a"), "image": ""}
    assert short([row], [row]).tasks["t"].scored == (row,)
