"""Counts what makes the host wait for the device: reads of a tensor's values, and shapes that depend on them.

On a GPU each such read drains the queue of kernels. On a CPU nothing waits, but the reads are the same, so they are
counted here without a GPU.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = frozenset({"tolist", "numpy", "cpu", "__array__"})
"""Methods that copy a tensor's values to the host, besides those that end in `_local_scalar_dense`."""
DATA_DEPENDENT = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim", "equal"}
)
"""Operations whose result is on the host, or whose shape depends on the values."""


@contextmanager
def counting_host_reads() -> Iterator[Counter[str]]:
    """Count the host's reads inside the block, by operation. A copy and reads of that copy count separately."""
    counts: Counter[str] = Counter()
    with _Methods(counts), _Operations(counts):
        yield counts


class _Methods(TorchFunctionMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the method, then run it."""
        del types
        name = getattr(func, "__name__", "")
        if name in READS:
            self._counts[name] += 1
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the operation, then run it."""
        del types
        name = func.overloadpacket.__name__
        if name in DATA_DEPENDENT:
            self._counts[name] += 1
        elif name in {"index", "index_put", "index_put_"} and any(_is_mask(each) for each in args[1] or ()):
            self._counts[f"{name} by a mask"] += 1
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in {torch.bool, torch.uint8}
