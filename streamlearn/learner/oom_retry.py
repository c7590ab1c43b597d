"""What to do when a step needs more memory than there is: take the batch in smaller parts, gradients added up.

    L = sum_p (n_p / n) L_p,     L_p the mean over part p's n_p learned tokens, n = sum_p n_p           (1)

is the mean over all learned tokens, whatever the parts are, and so are its gradients.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

import torch

from streamlearn.events import Event, get_logger

TRIES = 3
"""So many times the number of parts is doubled."""
_SAID_ON_CPU = "DefaultCPUAllocator"
_log = get_logger("learner")
T = TypeVar("T")


def in_parts(work: Callable[[int], T], parts: int, most: int, clear: Callable[[], None]) -> T:
    """`work(parts)`; again with twice as many, `most` at most, after `clear`, when memory does not suffice.

    Random numbers are drawn as if it were the first time.

    Raises:
        RuntimeError or MemoryError: what `work` raised; out of memory, even in the smallest parts.
    """
    noise = torch.get_rng_state()
    for tries_left in reversed(range(TRIES + 1)):
        try:
            return work(parts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or parts >= most or not tries_left:
                clear()
                raise
            said = " ".join(str(error).split())[:160]
        clear()  # outside of `except`: the error holds on to the tensors that must go
        torch.set_rng_state(noise)
        parts = min(2 * parts, most)
        _log.warning(Event.OUT_OF_MEMORY_RETRIED, error=said, parts=parts)
    raise AssertionError("the last try returns or raises")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on the CPU torch says so in words alone."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _SAID_ON_CPU in str(error)


def shares(number: int, parts: int) -> Iterator[slice]:
    """`parts` stretches of `number` neighbours, as equal as can be; none is empty when there are enough."""
    ends = [number * part // parts for part in range(parts + 1)]
    return (slice(first, last) for first, last in pairwise(ends))
