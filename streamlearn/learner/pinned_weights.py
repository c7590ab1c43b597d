"""The weights of one step, for a job that spans several training steps.

    at the first interruption   the job pins the weights: nothing is copied yet
    before an adapter changes   it is copied
    in each later slice         the copies are swapped in

So a job costs the memory of the adapters that are trained while it runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from streamlearn.learner.adapter_cache import AdapterCache


class PinnedWeights:
    """Created by `Learner.pin`; it is in force for as long as someone refers to it."""

    def __init__(self, tensors: Mapping[str, Sequence[Tensor]], cache: AdapterCache) -> None:
        """`tensors` are those that inference depends on, by adapter."""
        self._tensors = tensors
        self._cache = cache
        self._copies: dict[str, list[Tensor]] = {}
        self.in_use = False
        """Whether copies are swapped in."""

    def before_change(self, adapters: Iterable[str]) -> None:
        """Copy these adapters, which are in memory, unless they were copied before or did not exist at the pin."""
        for name in adapters:
            if name in self._tensors and name not in self._copies:
                self._copies[name] = [tensor.detach().clone() for tensor in self._tensors[name]]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Use the copies inside the block; after it, or after an error, parameters point to their own memory again."""
        with self._cache.holding(self._copies):
            live = {name: [tensor.data for tensor in self._tensors[name]] for name in self._copies}
            try:
                self._point_at(self._copies)
                self.in_use = bool(self._copies)
                yield
            finally:
                self.in_use = False
                self._point_at(live)

    def _point_at(self, tensors: Mapping[str, Sequence[Tensor]]) -> None:
        for name, values in tensors.items():
            for tensor, value in zip(self._tensors[name], values, strict=True):
                tensor.data = value
