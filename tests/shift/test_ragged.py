"""Arrays of different lengths, stored flat."""

import numpy as np
import pytest

from streamlearn.shift import change_tests as ragged


@pytest.mark.parametrize("lengths", [(), (0,), (3, 0, 2)])
def test_survives_its_arrays(lengths: tuple[int, ...]) -> None:
    """Empty rows and empty lists included."""
    rows = [np.arange(length, dtype=np.uint16) + 65_000 for length in lengths]
    arrays = ragged.to_arrays("x", rows)
    assert set(arrays) == {"x.sizes", "x.values"}
    back = ragged.from_arrays("x", arrays)
    assert [row.tolist() for row in back] == [row.tolist() for row in rows]
    assert all(row.dtype == np.uint16 for row in back)
