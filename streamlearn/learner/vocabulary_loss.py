"""Cross-entropy over a vocabulary from hidden states, some tokens at a time: no tensor has all tokens' logits.

    l_t = log sum_v exp(w_v h_t) - w_(y_t) h_t                                                  (1)
    dl_t / dh_t = sum_v (softmax(W h_t)_v - [v = y_t]) w_v                                      (2)

W is frozen, so (2) is all that the backward pass needs, and it is computed with (1), while a chunk's logits are there.
At 8 x 2048 tokens and a vocabulary of 151,936, float32 logits and their gradient would take 20 GB.
"""
# Shape suffixes: L tokens, C those of a chunk, D hidden size, V vocabulary.

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CPU_LOGITS, GPU_LOGITS = 2**24, 2**26
"""Logits of a chunk: 64 MB in float32 on a CPU, 256 MB elsewhere, where larger products are faster."""


def vocabulary_loss(hidden_LD: Tensor, head: nn.Linear, target_L: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eq. (1) in float32, and whether each target was the most probable token.

    Args:
        hidden_LD: Hidden states that predict the targets.
        head: The frozen linear that makes the logits; of one that is divided among processes, the weight is gathered.
        target_L: Ids of the next tokens.

    Returns:
        Losses (L,), part of the autograd graph, nats; and bool (L,).
    """
    loss_L, correct_L = _VocabularyLoss.apply(hidden_LD, head, target_L)  # type: ignore[no-untyped-call]
    return loss_L, correct_L


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_LD: Tensor, head: nn.Linear, target_L: Tensor) -> tuple[Tensor, Tensor]:
        loss_L = torch.empty(len(hidden_LD), dtype=torch.float32, device=hidden_LD.device)
        correct_L = torch.empty_like(target_L, dtype=torch.bool)
        gradient_LD = torch.empty_like(hidden_LD) if ctx.needs_input_grad[0] else None
        logits = CPU_LOGITS if hidden_LD.device.type == "cpu" else GPU_LOGITS
        size = max(1, logits // len(head.weight))
        for start in range(0, len(hidden_LD), size):
            chunk = slice(start, start + size)
            target_C1 = target_L[chunk, None]
            logits_CV = F.linear(hidden_LD[chunk], head.weight, head.bias).float()
            correct_L[chunk] = logits_CV.argmax(-1) == target_L[chunk]
            normalizer_C1 = logits_CV.logsumexp(-1, keepdim=True)
            loss_L[chunk] = (normalizer_C1 - logits_CV.gather(1, target_C1))[:, 0]
            if gradient_LD is not None:
                softmax_CV = logits_CV.sub_(normalizer_C1).exp_()
                softmax_CV.scatter_add_(1, target_C1, torch.full_like(target_C1, -1.0, dtype=torch.float32))
                torch.mm(softmax_CV.to(head.weight.dtype), head.weight, out=gradient_LD[chunk])
        ctx.save_for_backward(gradient_LD)
        ctx.mark_non_differentiable(correct_L)
        return loss_L, correct_L

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss_L: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        (gradient_LD,) = ctx.saved_tensors
        return (gradient_LD * d_loss_L[:, None]).to(gradient_LD.dtype), None, None
