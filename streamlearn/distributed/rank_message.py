"""Messages from the leader to the others: a JSON object, and arrays behind it.

8 bytes     length of the object, little-endian
object      orjson; `arrays` lists dtype and shape of each array
arrays      their bytes, in order
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

_LENGTH = 8


class Kind(StrEnum):
    """What the leader asks for."""

    BEAT = "beat"
    """Nothing: the leader is alive."""
    LOAD = "load"
    """Load the backbone."""
    STEP = "step"
    """Compute a share of a step."""
    SCORE = "score"
    """Compute scores in one forward pass."""
    FORWARD = "forward"
    """Take part in a pass that the leader makes alone."""
    END = "end"
    """Exit."""


@dataclass(frozen=True)
class RankMessage:
    """One message."""

    kind: Kind
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[NDArray[Any]] = ()

    def encode(self) -> bytes:
        """Return the message as bytes."""
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        listed = [(array.dtype.str, array.shape) for array in arrays]
        head = orjson.dumps({"kind": self.kind, "fields": dict(self.fields), "arrays": listed})
        return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(array.tobytes() for array in arrays)])

    @classmethod
    def decode(cls, data: bytes) -> "RankMessage":
        """The inverse of `encode`."""
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        head = orjson.loads(data[_LENGTH:start])
        arrays = []
        for dtype, shape in head["arrays"]:
            array = np.frombuffer(data, dtype=np.dtype(dtype), count=prod(shape), offset=start).reshape(shape)
            arrays.append(array)
            start += array.nbytes
        return cls(Kind(head["kind"]), head["fields"], arrays)
