"""A backbone divided among processes (FSDP2): each keeps its part of every weight that is divided.

The layers of the decoder are divided; so are the embeddings and the output linear of a text model with a plain head
(`checks`). A module's weights are gathered when it computes, forward and backward, and released again, so all processes
take part in a pass, module by module. The weights are frozen: nothing is ever reduced or scattered. The norm after the
last layer stays whole in each process, and so do the vision tower and the embeddings of an image-text model, which
compute before the decoder's pass begins.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.backbone.checks import gather_by, plain_head


def shard(model: Any, mesh: DeviceMesh, *, is_vision: bool) -> None:
    """Divide `model`, which is the same in all processes, before adapters are added to it.

    A module moves to the mesh's device as it is divided, so the device never holds the whole backbone.

    `is_vision`: whether it is an image-text model.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow, and only a divided backbone needs it

    def divide(module: nn.Module) -> Any:
        return fully_shard(module, mesh=mesh, reshard_after_forward=True)  # the default for a root module is not to

    for layer in model.get_decoder().layers:
        divide(layer)
    head = plain_head(model)
    if head is not None and not is_vision:
        _divide_vocabulary(head, model.get_input_embeddings(), divide)


def _divide_vocabulary(head: nn.Linear, embeddings: nn.Module, divide: Callable[[nn.Module], Any]) -> None:
    is_tied = head.weight is embeddings.weight
    divided = divide(embeddings)
    if is_tied:
        tied = _TiedHead(head, divided)
        gather_by(head, tied.gathered)
    else:
        gather_by(head, _Gathered(divide(head)))


class _Gathered:
    """Gathers a divided module's weights for uses outside of its own pass."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._module.unshard()
        try:
            yield
        finally:
            self._module.reshard()


class _TiedHead:
    """An output linear that shares the weight of divided embeddings, which FSDP does not know."""

    def __init__(self, head: nn.Linear, embeddings: Any) -> None:
        self._head, self._embeddings = head, embeddings
        self._follow()
        head.register_forward_pre_hook(self._before)
        head.register_forward_hook(self._after)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the weight for uses outside of the linear's own pass."""
        self._embeddings.unshard()
        self._follow()
        try:
            yield
        finally:
            self._release()

    def _before(self, *_: Any) -> None:
        self._embeddings.unshard()
        self._follow()

    def _after(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if not output.requires_grad:  # else the backward pass needs the weight; the next pass releases it
            self._release()

    def _release(self) -> None:
        self._embeddings.reshard()
        self._follow()

    def _follow(self) -> None:
        self._head.weight = self._embeddings.weight
