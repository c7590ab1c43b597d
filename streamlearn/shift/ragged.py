"""Lists of arrays of different lengths, as two plain arrays."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def to_arrays(name: str, rows: Sequence[NDArray[np.uint16]]) -> dict[str, NDArray[np.generic]]:
    """All rows end to end, and how long each is; as int32, which every reader of snapshots knows."""
    return {
        f"{name}.sizes": np.array([len(row) for row in rows], dtype=np.int64),
        f"{name}.values": np.concatenate([np.zeros(0, np.int32), *rows]).astype(np.int32),
    }


def from_arrays(name: str, arrays: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.uint16]]:
    """The inverse of `to_arrays`."""
    ends = np.cumsum(arrays[f"{name}.sizes"].astype(np.int64))
    return [row.copy() for row in np.split(arrays[f"{name}.values"].astype(np.uint16), ends)[: len(ends)]]
