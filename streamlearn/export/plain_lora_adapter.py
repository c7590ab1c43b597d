"""A plain LoRA beside the frozen linears, for forward passes that do not use the daemon's own adapters."""

from torch import Tensor
from torch.nn import functional as F

from streamlearn.adapters.routing_context import AdaptedLayer
from streamlearn.export.plain_lora import PlainLora


class PlainLoraAdapter:
    """Applies a plain LoRA, see `ParallelAdapter`."""

    def __init__(self, lora: PlainLora) -> None:
        self._lora = lora

    def __call__(self, layer: AdaptedLayer, x_TD: Tensor, y: Tensor) -> Tensor:
        """Add (alpha / rank) B A x in the dtype of `y`."""
        matrices = self._lora.layers[layer.name]
        A_ND, B_ON = matrices.A_ND.to(y), matrices.B_ON.to(y)
        return y + self._lora.scaling * F.linear(F.linear(x_TD.to(y.dtype), A_ND), B_ON)
