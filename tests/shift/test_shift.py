"""A declared change."""

from streamlearn.shift.detector import Shift


def test_survives_json() -> None:
    """`from_json` is the inverse of `to_json`."""
    shift = Shift("inputs", 3, 2, 1, True, 1, 40, 33, 4.5, 2.5, dropped=None)
    assert Shift.from_json(shift.to_json()) == shift
