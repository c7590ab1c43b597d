"""The packed loss: the layout of a batch, the loss of each record, and cross-entropy in chunks."""

from itertools import chain
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from streamlearn.backbone.checks import plain_head
from streamlearn.learner import loss
from streamlearn.learner import loss as vocabulary_loss
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.stream.record import IGNORED
from tests.doubles import example, random_examples
from tests.learner.reference import token_losses
from tests.learners import MakeLearner

CPU = torch.device("cpu")


def test_records_are_concatenated() -> None:
    """Ids, positions, cumulative lengths, and for each learned token its predictor, id and record."""
    packed = pack([example([10, 11, 12, 13], prompt_length=2), example([20, 21])], CPU)
    assert packed.input_ids.tolist() == [[10, 11, 12, 13, 20, 21]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.records.ends == (0, 4, 6)
    assert packed.predictor_L.tolist() == [1, 2, 4]
    assert packed.target_L.tolist() == [12, 13, 21]
    assert packed.segment_ids_L.tolist() == [0, 0, 1]
    assert packed.sequences.num == 2


def test_a_first_token_is_never_learned() -> None:
    """A record's first token would be predicted from the previous record, so its label does not count."""
    labelled = example([10, 11, 12], prompt_length=0)
    assert labelled.labels[0] != IGNORED
    packed = pack([example([1, 2]), labelled], CPU)
    assert packed.target_L.tolist() == [2, 11, 12]
    assert packed.predictor_L.tolist() == [0, 2, 3]


RECORDS = random_examples([9, 4, 12], prompt_length=2)


@torch.no_grad()
def test_a_packed_loss_is_the_loss_of_each_record(make_learner: MakeLearner) -> None:
    """Sums, hits and the mean over all learned tokens are those of one pass per record."""
    learner = make_learner()
    packed = pack(RECORDS, learner.device)
    result = packed_loss(learner.forward, packed)
    sums, correct = result.per_record(packed)
    losses, hits = zip(*(token_losses(learner.forward, record) for record in RECORDS), strict=True)
    assert sums.tolist() == pytest.approx([sum(own) for own in losses], rel=1e-4)
    assert packed.learned_B.tolist() == [len(own) for own in losses]
    assert correct.tolist() == [sum(own) for own in hits]
    assert result.token_L.tolist() == pytest.approx([*chain(*losses)], rel=1e-4)
    assert float(result.mean) == pytest.approx(fmean(chain(*losses)), rel=1e-4)
    assert result.correct_L.tolist() == [*chain(*hits)]


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


def test_a_step_is_that_with_whole_logits(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose head is not plain computes the same loss by itself."""
    examples = random_examples([9, 7, 8], prompt_length=2)
    result = make_learner()
    losses = [result.step(examples, [0, 0, 0]).loss for _ in range(3)]
    monkeypatch.setattr(loss, "plain_head", lambda _: None)
    expected = make_learner()
    assert losses == pytest.approx([expected.step(examples, [0, 0, 0]).loss for _ in range(3)], rel=1e-5)
