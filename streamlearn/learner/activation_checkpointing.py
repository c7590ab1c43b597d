"""Decoder layers that keep only their inputs for the backward pass, and are computed again in it.

A layer is computed again under the routing context of its pass, in whichever thread autograd runs, with the same random
numbers. Hooks are not called and loads not counted a second time; so what hooks compute is kept, as it is not computed
again. The gradients are those of a pass that keeps all.

transformers' own option is not used: it acts in training mode only, which would also switch dropout on and turn the
cache of a generation off, and it knows no routing context.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from streamlearn.adapters.routing_context import AdaptedLayer, RoutingContextHolder, RoutingDecision, RoutingHook
from streamlearn.backbone.load import decoder_layers


def checkpoint_layers(model: Any, holder: RoutingContextHolder) -> None:
    """Checkpoint the decoder layers of a model, in every pass that computes a gradient.

    Args:
        model: The backbone with its adapter.
        holder: Where its adapted layers find their context.
    """
    for layer in decoder_layers(model):
        layer.forward = _CheckpointedForward(layer, holder)


class _CheckpointedForward:
    """The forward pass of one layer."""

    def __init__(self, layer: nn.Module, holder: RoutingContextHolder) -> None:
        self._forward: Callable[..., Any] = layer.forward
        self._holder = holder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer's output."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the first computation and of the second one; called before the first."""
        context = self._holder.context
        first = replace(context, hooks=tuple(map(_keeping, context.hooks)))
        again = replace(context, hooks=(), block_decisions={}, recomputing=True)
        return self._holder.holding(first), self._holder.holding(again)


def _keeping(hook: RoutingHook) -> RoutingHook:
    """The hook, whose own graph is kept and not made again."""

    def keeping(layer: AdaptedLayer, decision: RoutingDecision) -> None:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            hook(layer, decision)

    return keeping
