"""Two properties of a model, measured when it is loaded rather than listed by architecture.

Plain head: the logits are one frozen linear over the decoder's last hidden state, and nothing else. The loss then needs
no logits of a whole batch (`learner.loss`). Models that scale or cap their logits after the linear compute all of them.

Packing: every record of a packed batch is computed as if it were alone. An architecture may lose the records' lengths
on the way to its attention, or carry state from token to token; its records would then be learned from one another.
"""
# Shape suffixes: T tokens, V vocabulary.

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from streamlearn.backbone.attention import Records

_HEADS: WeakKeyDictionary[nn.Module, nn.Linear] = WeakKeyDictionary()
_GATHER: WeakKeyDictionary[nn.Linear, Callable[[], AbstractContextManager[None]]] = WeakKeyDictionary()
_IDS = ((0, 1, 0),)


@torch.no_grad()
def find_plain_head(model: Any) -> None:
    """Compare the model's logits of three tokens with its output linear; remember the linear if they are equal."""
    head, decoder = model.get_output_embeddings(), _decoder(model)
    if type(head) is not nn.Linear or decoder is None or head.weight.requires_grad:
        return
    ids = torch.tensor(_IDS, device=head.weight.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    if torch.equal(logits, head(decoder(input_ids=ids, use_cache=False)[0])):
        _HEADS[model] = head


def plain_head(model: Any) -> nn.Linear | None:
    """Return the output linear if it is a plain head without an adapter; else None."""
    head = _HEADS.get(model)
    return head if head is not None and model.get_output_embeddings() is head else None


def gather_by(head: nn.Linear, gathered: Callable[[], AbstractContextManager[None]]) -> None:
    """Register how to gather the weight of an output linear that is divided among processes (`shard`)."""
    _GATHER[head] = gathered


def gathered(head: nn.Linear) -> AbstractContextManager[None]:
    """Gather the weight of an output linear inside the block, for uses other than the linear's own pass."""
    return _GATHER.get(head, nullcontext)()


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """Return the decoder's last hidden state, (B, T, D), for the arguments of the model's own pass."""
    hidden: Tensor = _decoder(model)(**inputs)[0]
    return hidden


def _decoder(model: Any) -> Any:
    """Return the model without its output linear; in an image-text model, it includes the vision tower."""
    return getattr(model, model.base_model_prefix, None)


@torch.no_grad()
def packing_obstacle(model: Any) -> str | None:
    """Compute a short record on its own, and twice in a packed batch with another record in between.

    In the batch both results must agree to half of the digits of the logits' dtype: products of equal rows round alike.
    The single result must agree roughly: other shapes round differently, and experts may change places.

    Returns:
        The part of the model that cannot be packed; None if it can be.
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
    """Compute the logits (T, V) of a packed batch, or of one record in the model's ordinary pass."""
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
    """Return the largest difference, relative to the largest value."""
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())
