"""Sequences of a pass: whose tokens are whose, found on the host."""

import pytest

from streamlearn.adapters.context import NO_REGIME, Sequences


def test_tokens_and_sequences_have_the_slot_of_their_record() -> None:
    """Per token by length, or by input row without lengths; per sequence as given; None without regimes."""
    packed = Sequences(lengths=(2, 1, 2), slots=(5, 3, 7))
    for _ in range(2):  # made once, and again the same
        slots_T = packed.slots_of(5, per_token=True)
        assert slots_T is not None
        assert slots_T.tolist() == [5, 5, 3, 7, 7]
    assert packed.slots_of(5, per_token=True) is slots_T
    slots_B = packed.slots_of(3, per_token=False)
    assert slots_B is not None
    assert slots_B.tolist() == [5, 3, 7]
    padded = Sequences(slots=(5, 3)).slots_of(6, per_token=True)
    assert padded is not None
    assert padded.tolist() == [5, 5, 5, 3, 3, 3]
    assert Sequences(lengths=(2, 4)).slots_of(6, per_token=True) is None


def test_what_adapts_the_sequences_is_listed_once() -> None:
    """Means stand for their adapters; the untouched backbone is nothing that adapts."""
    sequences = Sequences(lengths=(1, 2, 1, 3, 1), slots=(4, (2, 4), NO_REGIME, 4, (2, 4)))
    assert sequences.distinct == (4, (2, 4))
    assert sequences.adapted_slots == (4, 2)
    tokens = sequences.tokens_of((2, 4), 8, is_vision=False)
    assert tokens is not None
    assert tokens.tolist() == [1, 2, 7]
    adapted = sequences.tokens_with_regime(8, is_vision=False)
    assert adapted is not None
    assert adapted.tolist() == [0, 1, 2, 4, 5, 6, 7]


def test_one_regime_for_all_needs_no_indices() -> None:
    """Neither does a pass without regimes."""
    alone = Sequences(lengths=(1, 2), slots=(3, 3))
    assert alone.tokens_of(3, 3, is_vision=False) is None
    assert alone.tokens_with_regime(3, is_vision=False) is None
    assert Sequences(lengths=(1, 2)).tokens_with_regime(3, is_vision=False) is None
    assert Sequences(slots=(NO_REGIME,)).distinct == ()


@pytest.mark.parametrize(("num", "expected"), [(3, [1, 3, 3]), (6, [1, 1, 3, 3, 3, 3])])
def test_vision_tokens_belong_to_the_records_with_the_images(num: int, expected: list[int]) -> None:
    """One image in the second record, two in the fourth, for any number of tokens per image."""
    sequences = Sequences(lengths=(5, 5, 5, 5), slots=(4, 5, 6, NO_REGIME), vision_units=(0, 1, 0, 2))
    assert sequences.segment_ids(num, is_vision=True).tolist() == expected
    slots = sequences.slots_of(num, per_token=True, is_vision=True)
    assert slots is not None
    assert slots.tolist() == [5 if record == 1 else NO_REGIME for record in expected]
    tokens = sequences.tokens_with_regime(num, is_vision=True)
    assert tokens is not None
    assert tokens.tolist() == [i for i, record in enumerate(expected) if record == 1]


def test_rows_that_are_decoded_keep_what_adapts_them() -> None:
    """One token of each at a time; images were read with the prompts."""
    read = Sequences(lengths=(4, 2, 3), slots=(1, (0, 2), NO_REGIME), vision_units=(1, 0, 0))
    assert read.of_rows([0, 2]) == Sequences(lengths=(1, 1), slots=(1, NO_REGIME))
    assert Sequences(lengths=(4, 2)).of_rows([1]).slots is None
