"""Pieces of text: whole characters, which join to the text of all tokens."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from streamlearn.jobs.generate import IncrementalText

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def byte_tokens() -> Tokenizer:
    """A byte-level tokenizer with a token per byte and a control token."""
    letters = sorted(_letters().values())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2)."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + i) for i, byte in enumerate(rest)}}


BYTES = byte_tokens()
END = BYTES.get_vocab_size() - 1
"""The control token."""


def text_of(ids: Sequence[int]) -> str:
    return str(BYTES.decode(list(ids), skip_special_tokens=True))


def tokens_of(data: bytes) -> list[int]:
    letters = _letters()
    return [int(BYTES.token_to_id(letters[byte]) or 0) for byte in data]


def pieces_of(ids: Sequence[int]) -> list[str]:
    text = IncrementalText(text_of)
    return [*(text.add(token) for token in ids), text.flush()]


def test_a_character_waits_for_its_last_byte() -> None:
    """Of one to four bytes each."""
    assert pieces_of(tokens_of("aé模🦊b".encode())) == ["a", "", "é", "", "", "模", "", "", "", "🦊", "b", ""]


def test_a_character_that_stays_incomplete_is_written_at_the_end() -> None:
    """As the tokenizer writes it."""
    assert pieces_of(tokens_of(b"a\xe6\xa8")) == ["a", "", "", REPLACEMENT]


def test_control_tokens_write_nothing() -> None:
    """Also in the middle of a text, and first."""
    assert pieces_of([END, *tokens_of(b"a"), END, *tokens_of(b" b")]) == ["", "a", "", " ", "b", ""]


@given(st.lists(st.integers(0, END), max_size=24) | st.text(max_size=8).map(lambda text: tokens_of(text.encode())))
def test_pieces_join_to_the_text_of_all_tokens(ids: list[int]) -> None:
    """Of any tokens, valid or not; every piece but the last ends with a whole character."""
    pieces = pieces_of(ids)
    assert "".join(pieces) == text_of(ids)
    assert not any(piece.endswith(REPLACEMENT) for piece in pieces[:-1])


@pytest.mark.parametrize("words", [["▁a", "▁b", "c"], ["a", "▁", "b"]])
def test_the_space_in_front_of_a_word_is_kept(words: list[str]) -> None:
    """Tokenizers that drop it at the start of a text keep it in the middle."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.Metaspace()
    text = IncrementalText(lambda ids: str(tokenizer.decode(list(ids))))
    assert "".join(text.add(i) for i in range(len(words))) == tokenizer.decode(list(range(len(words))))
    assert "".join(words).lstrip("▁").replace("▁", " ") == tokenizer.decode(list(range(len(words))))
