"""Stop strings: found by the text, however it comes in pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.jobs.generate import StopStrings


def by_definition(text: str, strings: list[str]) -> str:
    """Character by character: the text in front of the first string that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [each for each in strings if text[:end].endswith(each)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def cut(pieces: list[str], strings: list[str]) -> str:
    stop, text = StopStrings(strings), ""
    for piece in pieces:
        text += stop.add(piece)
        if stop.found:
            return text
    return text + stop.flush()


few = st.text("ab\n", max_size=5)


@given(st.lists(few, max_size=8), st.lists(few.filter(bool), max_size=4))
def test_a_text_is_cut_as_by_definition_in_any_pieces(pieces: list[str], strings: list[str]) -> None:
    """Strings that overlap, contain each other, or lie across several pieces."""
    assert cut(pieces, strings) == by_definition("".join(pieces), strings)


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        (["one", " two"], ["one", " two"]),
        (["one ST", "ART"], ["one ", "START"]),
        (["one ST", "OP two"], ["one ", ""]),
        (["SSTO", "P"], ["S", ""]),
    ],
)
def test_only_what_may_begin_a_stop_string_waits(pieces: list[str], written: list[str]) -> None:
    """It is written with the first piece that makes it something else."""
    stop = StopStrings(["STOP"])
    assert [stop.add(piece) for piece in pieces] == written


def test_what_waited_is_written_at_the_end() -> None:
    """A text that ends with the beginning of a stop string keeps it."""
    stop = StopStrings(["STOP"])
    assert stop.add("one ST") == "one "
    assert (stop.flush(), stop.flush(), stop.found) == ("ST", "", False)
