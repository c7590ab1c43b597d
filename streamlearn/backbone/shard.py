"""The decoder's layers divided among processes (FSDP2): each keeps its part of every layer.

A layer's weights are gathered when it computes, forward and backward, and given up again. So a pass is one in which all
processes take part, layer by layer. The weights are frozen: nothing is ever reduced or scattered. Embeddings, the
output linear and a vision tower stay whole in each process.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh


def shard(model: Any, mesh: DeviceMesh) -> None:
    """Divide the layers of `model`, which is the same in all processes, before adapters are added to it.

    A layer moves to the mesh's device as it is divided, so the device never holds the whole backbone.
    """
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow, and only a divided backbone needs it

    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # by default not, where nothing is around it
