"""Cross-entropy in chunks, against that of whole logits."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from streamlearn.backbone.checks import plain_head
from streamlearn.learner import loss
from streamlearn.learner import loss as vocabulary_loss
from streamlearn.learner.loss import pack, packed_loss
from tests.doubles import random_examples
from tests.learners import MakeLearner

L, D, V = 23, 12, 40


def whole(hidden: Tensor, head: nn.Linear, target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = head(hidden).float()
    losses = F.cross_entropy(logits, target, reduction="none")
    (gradient,) = torch.autograd.grad((losses * weights).sum(), hidden)
    return losses.detach(), logits.argmax(-1) == target, gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, L, 100])
def test_it_is_the_cross_entropy_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int, bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Losses, correct tokens and the gradient, for any size of chunks and any weights of the tokens."""
    monkeypatch.setattr(vocabulary_loss, "CPU_LOGITS", chunk * V)
    torch.manual_seed(0)
    head = nn.Linear(D, V, bias=bias, dtype=dtype).requires_grad_(False)
    hidden = torch.randn(L, D, dtype=dtype, requires_grad=True)
    target, weights = torch.randint(V, (L,)), torch.rand(L)
    losses, correct = vocabulary_loss.vocabulary_loss(hidden, head, target)
    (gradient,) = torch.autograd.grad((losses * weights).sum(), hidden)
    expected_losses, expected_correct, expected_gradient = whole(hidden, head, target, weights)
    torch.testing.assert_close(losses.detach(), expected_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(gradient, expected_gradient, rtol=tolerance, atol=tolerance)
    assert torch.equal(correct, expected_correct)
    assert (losses.dtype, gradient.dtype) == (torch.float32, dtype)


def test_no_tensor_has_the_logits_of_all_tokens(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither forward nor backward: the largest tensor over the vocabulary is a chunk's."""
    learner = make_learner(preset="streamlearn")
    examples = random_examples([30, 25, 28], prompt_length=2)
    head = plain_head(learner.forward)
    assert head is not None
    rows: list[int] = []
    monkeypatch.setattr(vocabulary_loss, "CPU_LOGITS", 8 * head.out_features)

    def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows.append(len(hidden))
        return F.linear(hidden, weight, bias)

    monkeypatch.setattr(vocabulary_loss, "F", SimpleNamespace(linear=linear))
    learner.step(examples, [0, 0, 0])
    learned = sum(each.num_learned for each in examples)
    assert (max(rows), sum(rows)) == (8, learned)


@pytest.mark.parametrize("preset", ["streamlearn", "mh-moe", "lora"])
def test_a_step_is_that_with_whole_logits(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """A model whose head is not plain computes the same loss by itself."""
    examples = random_examples([9, 7, 8], prompt_length=2)
    found = make_learner(preset=preset)
    losses = [found.step(examples, [0, 0, 0]).loss for _ in range(3)]
    monkeypatch.setattr(loss, "plain_head", lambda _: None)
    expected = make_learner(preset=preset)
    assert losses == pytest.approx([expected.step(examples, [0, 0, 0]).loss for _ in range(3)], rel=1e-5)


def test_scoring_needs_no_gradient(make_learner: MakeLearner) -> None:
    """Without one the loss is the same, and nothing is kept for a backward pass."""
    learner = make_learner()
    packed = pack(random_examples([9, 7], prompt_length=2), learner.device)
    with torch.no_grad():
        scored = packed_loss(learner.forward, packed)
    trained = packed_loss(learner.forward, packed)
    assert scored.mean.grad_fn is None
    torch.testing.assert_close(scored.mean, trained.mean.detach())
