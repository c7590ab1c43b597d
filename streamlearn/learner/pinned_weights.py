"""The weights of one step, for a job that spans several training steps.

    at the first interruption   the job pins the weights: nothing is copied yet
    before an adapter changes   it is copied
    in each later slice         the copies are swapped in

So a job costs the memory of the adapters that are trained while it runs. An adapter that is removed, or replaced by
another one (a new regime in its slot, a rollback), is not copied: a slice that would use it ends the job with an error,
and the request can be repeated.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from streamlearn.errors import AdapterGoneError
from streamlearn.learner.adapter_cache import AdapterCache


class PinnedWeights:
    """Created by `Learner.pin`; it is in force for as long as someone refers to it."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]], cache: AdapterCache) -> None:
        """`tensors` are those that inference depends on, by adapter."""
        self._tensors = dict(tensors)
        self._cache = cache
        self._copies: dict[str, list[Tensor]] = {}
        self._removed: set[str] = set()
        self.in_use = False
        """Whether a job runs on the pinned weights, and these are not all the live ones."""

    def before_change(self, adapters: Iterable[str]) -> None:
        """Copy these adapters, which are in memory, unless they were copied before or did not exist at the pin."""
        for name in adapters:
            if name in self._tensors and name not in self._copies:
                self._copies[name] = [tensor.detach().clone() for tensor in self._tensors[name]]

    def before_removal(self, adapters: Iterable[str]) -> None:
        """Give these adapters up, also one that is replaced by another of its name."""
        for name in self._tensors.keys() & set(adapters):
            del self._tensors[name]
            self._copies.pop(name, None)
            self._removed.add(name)

    def check(self, adapters: Collection[str]) -> None:
        """Make sure that a pass can have the pinned weights of these adapters; any can outside of `swapped_in`.

        Raises:
            AdapterGoneError: one was removed or replaced.
        """
        if self.in_use and not self._removed.isdisjoint(adapters):
            raise AdapterGoneError(
                "the weights of this request are gone: the regime that answers it was removed, replaced or rolled back "
                "while it ran; repeat the request"
            )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the copies inside the block; after it, or after an error, parameters point to their own memory again."""
        with self._cache.holding(self._copies):
            live = {name: [tensor.data for tensor in self._tensors[name]] for name in self._copies}
            try:
                self._point_at(self._copies)
                self.in_use = bool(self._copies or self._removed)
                yield
            finally:
                self.in_use = False
                self._point_at(live)

    def _point_at(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        for name, values in tensors.items():
            for tensor, value in zip(self._tensors[name], values, strict=True):
                tensor.data = value
