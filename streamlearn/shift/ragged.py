"""Arrays of different lengths, stored as two flat arrays."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def to_arrays(name: str, rows: Sequence[NDArray[np.uint16]]) -> dict[str, NDArray[np.generic]]:
    """The concatenated rows, as int32 because every snapshot reader supports it, and the length of each row."""
    return {
        f"{name}.sizes": np.array([len(row) for row in rows], dtype=np.int64),
        f"{name}.values": np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32),
    }


def from_arrays(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.uint16]]:
    """Inverse of `to_arrays`."""
    ends = np.cumsum(arrays[f"{name}.sizes"].astype(np.int64))
    return [row.copy() for row in np.split(arrays[f"{name}.values"].astype(np.uint16), ends)[: len(ends)]]
