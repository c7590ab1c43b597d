"""A training path: the weights at its start, the weights before the current update, and what is summed along it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class TrainingPath(ABC):
    """The path of some parameters through weight space. Call `before` and `after` each update."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = tuple(parameters)
        self._parameters = [parameter.detach() for parameter in parameters.values()]  # views, which follow the updates
        self._start = [parameter.clone() for parameter in self._parameters]
        self._before = [torch.empty_like(parameter) for parameter in self._parameters]

    def before(self) -> None:
        """Store the weights that the next update starts from."""
        torch._foreach_copy_(self._before, self._parameters)

    @abstractmethod
    def after(self, gradients: Sequence[Tensor | None], *, scale: float = 1.0) -> None:
        """Add the update made since `before`.

        Args:
            gradients: Those of the loss, in the order of the parameters; None for a parameter that was not trained.
            scale: Factor that undoes clipping: norm before clipping over norm after it.
        """

    @abstractmethod
    def importance(self, xi: float) -> dict[str, Tensor]:
        """Return the importance of each weight by parameter name, never negative; `xi` damps it."""

    def rank_invariant(self, xi: float) -> dict[str, Tensor]:
        """Return an importance that does not depend on rotations of the rank dimension."""
        return self.importance(xi)

    def restart(self) -> None:
        """Start a new path at the current weights."""
        for tensors in self._sums().values():
            torch._foreach_zero_(tensors)
        torch._foreach_copy_(self._start, self._parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return sums and starting points by name, for a snapshot between two updates; the tensors are not copied."""
        parts = {**self._sums(), "start": self._start}
        return {
            f"{name}.{part}": tensor
            for part, tensors in parts.items()
            for name, tensor in zip(self._names, tensors, strict=True)
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, in place."""
        own = self.state_dict()
        assert own.keys() == tensors.keys(), "the snapshot's manifest was checked against this adapter before"
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    @abstractmethod
    def _sums(self) -> dict[str, list[Tensor]]:
        """What is zero at the start of a path, by its name in snapshots, in the order of the parameters."""
