"""Long prompts lose their middle."""

import pytest

from benchmarks.learn.shorten import GAP, shortened, without_middle
from benchmarks.learn.suite import Json, Suite, TaskSegment
from tests.benchmarks.learn.decoders import LetterDecoder

LONG = "Instruction: " + "x" * 300 + " Answer:"
LIMIT = 100


def plain(prompt: str, answer: str) -> Json:
    return {"prompt": prompt, "completion": answer, "meta": {"task": "t"}}


def chat(prompt: str, answer: str) -> Json:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "meta": {"task": "t"}}


def suite_of(train: list[Json], tests: list[Json]) -> Suite:
    return Suite("s", (TaskSegment(("t",), tuple(train)),), {"t": tuple(tests)}, train={"t": tuple(train)})


@pytest.mark.parametrize("form", [plain, chat])
def test_head_and_tail_of_a_prompt_stay(form: object) -> None:
    """The whole record fits, and the prompt's length says nothing about its own answer."""
    assert callable(form)
    suite = suite_of([form(LONG, "long answer"), form("short", "a")], [form(LONG, "a"), form(LONG, "an answer")])
    found = shortened(suite, LetterDecoder(), LIMIT)
    decoder = LetterDecoder()
    (segment,) = found.segments
    for record in (*segment.records, *found.tests["t"]):
        assert len(decoder.decode_value(record)) <= LIMIT
    lengths = {decoder.decode_value(record).prompt_length for record in found.tests["t"]}
    assert lengths == {LIMIT - len("long answer")}
    text = decoder.text(decoder.decode_value(found.tests["t"][0]).input_ids.tolist())
    assert text.startswith("Instruction: ")
    assert GAP in text
    assert text.endswith(" Answer:a")
    assert segment.records[1] is suite.segments[0].records[1]
    assert found.train["t"] == segment.records


def test_an_answer_without_space_loses_its_end() -> None:
    """At most a quarter of the tokens is kept free for it."""
    found = shortened(suite_of([plain(LONG, "y" * 200)], []), LetterDecoder(), LIMIT)
    (record,) = found.train["t"]
    assert len(record["prompt"]) == LIMIT * 3 // 4
    assert record["completion"] == "y" * (LIMIT // 4)


def test_a_short_prompt_leaves_more_to_a_long_answer() -> None:
    """An answer may be longer than a quarter."""
    found = shortened(suite_of([plain("?", "y" * 90)], []), LetterDecoder(), LIMIT)
    assert found.train["t"][0]["completion"] == "y" * 90


def test_records_with_images_stay_as_they_are() -> None:
    """Their placeholders are no text to cut."""
    record = {**plain(LONG, "a"), "image": ""}
    assert shortened(suite_of([record], [record]), LetterDecoder(), LIMIT).tests["t"] == (record,)


def test_the_middle_goes() -> None:
    """As much of the head as of the tail stays, or one letter less."""
    assert without_middle("abcdefgh", 5) == f"ab{GAP}fgh"
    assert without_middle("abcdefgh", 0) == GAP
