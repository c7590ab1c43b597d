"""The kernel that takes records of different lengths at once, on a GPU, against each record on its own."""

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from streamlearn.backbone.attention import Records, packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (7, 1, 130, 33, 64)
QUERY_HEADS, KEY_HEADS, HEAD_SIZE, WINDOW = 9, 3, 64, 16


def drawn(heads: int, seed: int) -> Tensor:
    """Random heads of all records, (1, heads, T, head size), float32 with the values of bfloat16."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, sum(LENGTHS), HEAD_SIZE, generator=draws).bfloat16().float()


def attended(dtype: torch.dtype, device: str, window: int | None) -> list[Tensor]:
    """Output and gradients of query, key and value, float32 on the CPU."""
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (drawn(each, seed).to(device, dtype).requires_grad_() for seed, each in enumerate(heads))
    output, _ = packed_attention(Module(), query, key, value, None, sliding_window=window, records=Records(LENGTHS))
    incoming = drawn(QUERY_HEADS, 3).transpose(1, 2).to(device, dtype)
    gradients = torch.autograd.grad(output, (query, key, value), incoming)
    return [each.detach().cpu().float() for each in (output, *gradients)]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_one_kernel_computes_what_the_records_give_one_after_another(window: int | None) -> None:
    """Output and gradients differ from float32 by what bfloat16 rounds, with and without a sliding window."""
    expected = attended(torch.float32, "cpu", window)
    result = attended(torch.bfloat16, "cuda", window)
    assert len(result) == len(expected) == 4
    for one, other in zip(result, expected, strict=True):
        assert (one - other).norm() / other.norm() < 0.01


def test_values_of_another_head_size_are_attended_to() -> None:
    """As in multi-head latent attention: the output is that for values with zeros added, without them."""
    query, key, value = (drawn(QUERY_HEADS, seed).to("cuda", torch.bfloat16) for seed in range(3))
    value[..., HEAD_SIZE // 2 :] = 0
    result, expected = (
        packed_attention(Module(), query, key, each, None, records=Records(LENGTHS))[0]
        for each in (value[..., : HEAD_SIZE // 2], value)
    )
    assert result.is_contiguous()
    assert (result - expected[..., : HEAD_SIZE // 2]).float().norm() / expected.float().norm() < 0.01


def test_a_token_changes_no_bit_of_another_record_on_a_gpu() -> None:
    """A changed key reaches no record but its own."""
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    query, key, value = (drawn(each, seed).to("cuda", torch.bfloat16) for seed, each in enumerate(heads))
    changed = key.clone()
    changed[:, :, 3] += 1
    before, after = (
        packed_attention(Module(), query, each, value, None, records=Records(LENGTHS))[0] for each in (key, changed)
    )
    assert not torch.equal(before[:, : LENGTHS[0]], after[:, : LENGTHS[0]])
    assert torch.equal(before[:, LENGTHS[0] :], after[:, LENGTHS[0] :])
