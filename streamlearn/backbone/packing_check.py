"""Whether a loaded model computes every record of a packed batch as if it were alone.

An architecture may lose the records' lengths on the way to its attention, or carry state from token to token; its
records would then be learned from one another. Which ones do is measured when a model is loaded, in the dtype of the
run, not listed.
"""
# Shape suffixes: T tokens, V vocabulary.

from typing import Any

import torch
from torch import Tensor

from streamlearn.backbone.attention import Records


@torch.no_grad()
def packing_obstacle(model: Any) -> str | None:
    """Compute a short record alone, and twice in a packed batch with another record in between.

    In the batch it must be the same twice, to half of the digits of the logits' dtype: products of equal rows round
    alike. Alone it must be roughly the same: other shapes round differently, and experts may change places.

    Returns:
        What cannot be packed; None if nothing is in the way.
    """
    size = model.get_input_embeddings().weight.shape[0]
    short = [size // 4, size // 3, size // 2]  # of text: control and image tokens are at the ends of a vocabulary
    other = [size // 2, size // 3, size // 4, size // 3, size // 2]
    try:
        packed_TV = _logits(model, [short, other, short])
    except NotImplementedError as error:
        return str(error)
    first_TV, last_TV = packed_TV[: len(short)], packed_TV[-len(short) :]
    rounding = torch.finfo(packed_TV.dtype).eps
    if _difference(first_TV, last_TV) > rounding**0.5:
        return "attention that reaches from one record of a batch into another"
    if _difference(first_TV, _logits(model, [short])) > rounding**0.25:
        return "attention or positions that differ in a batch"
    return None


def _logits(model: Any, records: list[list[int]]) -> Tensor:
    """Logits (T, V) of a packed batch; of one record, those of the model's ordinary pass."""
    device = model.get_input_embeddings().weight.device
    lengths = [len(record) for record in records]
    packed: dict[str, Any] = {}
    if len(records) > 1:
        positions = torch.cat([torch.arange(length) for length in lengths])
        packed = {"position_ids": positions[None].to(device), "records": Records(lengths)}
    ids = torch.tensor([[token for record in records for token in record]], device=device)
    logits_TV: Tensor = model(input_ids=ids, use_cache=False, **packed).logits[0]
    return logits_TV


def _difference(one: Tensor, other: Tensor) -> float:
    """Largest difference, as a part of the largest value."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())
