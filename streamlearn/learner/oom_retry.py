"""Retry of a step that ran out of memory, in smaller parts whose gradients are accumulated.

    L = sum_p (n_p / n) L_p,     L_p the mean over the n_p learned tokens of part p, n = sum_p n_p      (1)

is the mean over all learned tokens for any partition of the batch, and its gradient is the gradient of that mean.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

import torch

from streamlearn.events import Event, get_logger

MAX_RETRIES = 3
"""Maximum retries of one step; each doubles the number of parts."""
_CPU_ALLOCATOR = "DefaultCPUAllocator"
_log = get_logger("learner")
T = TypeVar("T")


def with_oom_retry(work: Callable[[int], T], parts: int, max_parts: int, clear: Callable[[], None]) -> T:
    """Return `work(parts)`; when it runs out of memory, call `clear` and retry with twice as many parts.

    Every try starts from the same state of torch's random number generator.

    Args:
        work: Does the work in the given number of parts.
        parts: Number of parts of the first try.
        max_parts: Maximum number of parts.
        clear: Releases what a failed try left behind.

    Raises:
        RuntimeError or MemoryError: the error of `work`; if it is out of memory, that of the last try.
    """
    rng_state = torch.get_rng_state()
    for retries_left in reversed(range(MAX_RETRIES + 1)):
        try:
            return work(parts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or parts >= max_parts or not retries_left:
                clear()
                raise
            message = " ".join(str(error).split())[:160]
        clear()  # outside of `except`: the error's traceback keeps the tensors alive
        torch.set_rng_state(rng_state)
        parts = min(2 * parts, max_parts)
        _log.warning(Event.OUT_OF_MEMORY_RETRIED, error=message, parts=parts)
    raise AssertionError("the last try returns or raises")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on the CPU, torch raises a plain RuntimeError with a message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_ALLOCATOR in str(error)


def slices(length: int, parts: int) -> Iterator[slice]:
    """Split `range(length)` into `parts` consecutive slices of nearly equal size; none is empty if parts <= length."""
    ends = [length * part // parts for part in range(parts + 1)]
    return (slice(first, last) for first, last in pairwise(ends))
