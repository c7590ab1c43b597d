"""Models whose logits are one frozen linear over the decoder's last hidden state, and nothing else.

Their loss needs no logits of a whole batch (`learner.vocabulary_loss`). Some architectures scale or cap their logits
after the linear; they keep their own way. Which is which is measured when a model is loaded, not listed.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

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
    """The output linear, if it alone makes the logits and has no adapter; None otherwise, or if nobody looked."""
    head = _HEADS.get(model)
    return head if head is not None and model.get_output_embeddings() is head else None


def gather_by(head: nn.Linear, gathered: Callable[[], AbstractContextManager[None]]) -> None:
    """Remember how the weight of an output linear is gathered, because it is divided among processes (`shard`)."""
    _GATHER[head] = gathered


def gathered(head: nn.Linear) -> AbstractContextManager[None]:
    """Have the whole weight of an output linear in this process, for a use other than the linear's own pass."""
    return _GATHER.get(head, nullcontext)()


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """The decoder's last hidden state, (B, T, D), for the arguments of the model's own pass."""
    hidden: Tensor = _decoder(model)(**inputs)[0]
    return hidden


def _decoder(model: Any) -> Any:
    """The model without its output linear: of an image-text model, the vision tower is part of it."""
    return getattr(model, model.base_model_prefix, None)
