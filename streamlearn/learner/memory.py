"""Memory of a step: a retry in smaller parts when it runs out, and activation checkpointing.

    L = sum_p (n_p / n) L_p,     L_p the mean over the n_p learned tokens of part p, n = sum_p n_p      (1)

is the mean over all learned tokens for any partition of the batch, and its gradient is the gradient of that mean.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from streamlearn.adapters.context import AdaptedLayer, RoutingContextHolder, RoutingDecision, RoutingHook
from streamlearn.backbone.load import decoder_layers
from streamlearn.events import Event, get_logger

CPU, CUDA = "rng.torch", "rng.cuda"
MAX_RETRIES = 3
"""Maximum retries of one step; each doubles the number of parts."""
_CPU_ALLOCATOR = "DefaultCPUAllocator"
_log = get_logger("learner")
T = TypeVar("T")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's generator, and of the GPU's where the model is on one: uint8, by name."""
    on_gpu = {CUDA: torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {CPU: torch.get_rng_state(), **on_gpu}


def restore_random_state(tensors: MutableMapping[str, Tensor], device: torch.device) -> None:
    """Take the states out of the tensors of a snapshot and set them; a GPU's state applies to a GPU only."""
    torch.set_rng_state(tensors.pop(CPU))
    on_gpu = tensors.pop(CUDA, None)
    if on_gpu is not None and device.type == "cuda":
        torch.cuda.set_rng_state(on_gpu, device)


def with_oom_retry(
    work: Callable[[int], T], parts: int, max_parts: int, clear: Callable[[], None], device: torch.device
) -> T:
    """Return `work(parts)`; when it runs out of memory, call `clear` and retry with twice as many parts.

    Every try starts from the same state of torch's random number generators.

    Args:
        work: Does the work in the given number of parts.
        parts: Number of parts of the first try.
        max_parts: Maximum number of parts.
        clear: Releases what a failed try left behind.
        device: Where the model is.

    Raises:
        RuntimeError or MemoryError: the error of `work`; if it is out of memory, that of the last try.
    """
    start = random_state(device)
    for retries_left in reversed(range(MAX_RETRIES + 1)):
        try:
            return work(parts)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or parts >= max_parts or not retries_left:
                clear()
                raise
            message = " ".join(str(error).split())[:160]
        clear()  # outside of `except`: the error's traceback keeps the tensors alive
        restore_random_state(dict(start), device)
        parts = min(2 * parts, max_parts)
        _log.warning(Event.OUT_OF_MEMORY_RETRIED, error=message, parts=parts)
    raise AssertionError("the last try returns or raises")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; on the CPU, torch raises a plain RuntimeError with a message."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or _CPU_ALLOCATOR in str(error)


def slices(length: int, parts: int) -> Iterator[slice]:
    """Split `range(length)` into `parts` consecutive slices of nearly equal size; none is empty if parts <= length."""
    ends = [length * part // parts for part in range(parts + 1)]
    return (slice(first, last) for first, last in pairwise(ends))


# Activation checkpointing for decoder layers: a layer keeps only its inputs, and is recomputed in the backward pass.
#
# A layer is recomputed under the routing context of its pass, in whichever thread autograd runs, with the same random
# numbers. Hooks are not called and loads not counted a second time, so the results of hooks are kept. The gradients are
# those of a pass that keeps everything.
#
# transformers' own option acts in training mode only, which would also switch dropout on and the cache of a generation
# off, and it knows no routing context.


def checkpoint_layers(model: Any, holder: RoutingContextHolder) -> None:
    """Checkpoint the decoder layers of a model, in every pass that computes a gradient.

    Args:
        model: The backbone with its adapter.
        holder: Has the context of its adapted layers.
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
        """Return the contexts of the forward pass and of the recomputation; called before the first."""
        context = self._holder.context
        first = replace(context, hooks=tuple(map(_keeping, context.hooks)))
        again = replace(context, hooks=(), block_decisions={}, recomputing=True)
        return self._holder.using(first), self._holder.using(again)


def _keeping(hook: RoutingHook) -> RoutingHook:
    """Wrap a hook so that its own graph is kept, not recomputed."""

    def keeping(layer: AdaptedLayer, decision: RoutingDecision) -> None:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            hook(layer, decision)

    return keeping
