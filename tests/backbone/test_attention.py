"""Packed batches against one forward pass per record with transformers' eager attention."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from streamlearn.adapters.presets import HeadLoraConfig
from streamlearn.adapters.tuner import attach
from streamlearn.backbone import attention
from streamlearn.backbone.attention import Records, packed_attention
from streamlearn.backbone.load import load, outline
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import decode
from streamlearn.settings import BackboneSettings
from streamlearn.stream.record import Prompt
from tests.backbone.conftest import WINDOW, Folders
from tests.doubles import Architecture, random_examples
from tests.learner.reference import greedy

LENGTHS = (7, 2, 13, 1, WINDOW, WINDOW + 1)
RECORDS = [example.input_ids.tolist() for example in random_examples(LENGTHS)]


@pytest.fixture(scope="module", params=get_args(Architecture))
def models(request: pytest.FixtureRequest, folder_of: Folders) -> tuple[Any, Any]:
    """The model as this package loads it, and the same weights with eager attention."""
    folder = folder_of(request.param)
    settings = BackboneSettings(model=str(folder), dtype="float32", device="cpu")
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return load(settings, outline(settings)).model, eager


@torch.no_grad()
def packed_logits(model: Any, records: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits of each record from one packed batch."""
    cu_seqlens = [0]
    for record in records:
        cu_seqlens.append(cu_seqlens[-1] + len(record))
    logits = model(
        input_ids=torch.tensor([[token for record in records for token in record]]),
        position_ids=torch.tensor([[t for record in records for t in range(len(record))]]),
        records=Records([len(record) for record in records]),
        use_cache=False,
    ).logits[0]
    return [logits[start:end] for start, end in pairwise(cu_seqlens)]


@torch.no_grad()
def unpacked(model: Any, record: Sequence[int]) -> Tensor:
    """Logits of a record in a forward pass of its own."""
    logits: Tensor = model(input_ids=torch.tensor([record]), use_cache=False).logits[0]
    return logits


def test_a_packed_batch_equals_one_pass_per_record(models: tuple[Any, Any]) -> None:
    """The logits of every record are those of eager attention over it, with and without sliding windows."""
    packed, eager = models
    for record, logits in zip(RECORDS, packed_logits(packed, RECORDS), strict=True):
        torch.testing.assert_close(logits, unpacked(eager, record), rtol=1e-4, atol=1e-4)


def test_a_token_changes_no_bit_of_another_record(models: tuple[Any, Any]) -> None:
    """A changed token changes the later logits of its own record and no bit of another record."""
    packed, _ = models
    changed = [list(record) for record in RECORDS]
    changed[0][3] = changed[0][3] + 1
    before, after = packed_logits(packed, RECORDS), packed_logits(packed, changed)
    assert torch.equal(before[0][:3], after[0][:3])
    assert not torch.allclose(before[0][-1], after[0][-1], rtol=1e-3)  # the model is sensitive enough to reveal a leak
    for other_before, other_after in zip(before[1:], after[1:], strict=True):
        assert torch.equal(other_before, other_after)


def test_a_pass_without_cumulative_lengths_is_one_record(models: tuple[Any, Any]) -> None:
    """It equals eager attention, also for a record longer than any window."""
    packed, eager = models
    torch.testing.assert_close(unpacked(packed, RECORDS[2]), unpacked(eager, RECORDS[2]), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cached_continuation_equals_a_whole_pass(models: tuple[Any, Any]) -> None:
    """Token by token after a left-padded prompt, with a cache, the logits are those of eager attention without one."""
    packed, eager = models
    record, padding, prompt = RECORDS[2], 4, 6
    cache = DynamicCache(config=packed.config)
    pieces = [[1] * padding + record[:prompt], *([token] for token in record[prompt:])]
    length, result = 0, []
    for piece in pieces:
        length += len(piece)
        mask = torch.tensor([[0] * padding + [1] * (length - padding)])
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -len(piece) :]
        output = packed(
            input_ids=torch.tensor([piece]), attention_mask=mask, position_ids=positions, past_key_values=cache
        )
        result.append(output.logits[0, -1])
    torch.testing.assert_close(torch.stack(result), unpacked(eager, record)[prompt - 1 :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("window", "dtype"), [(None, torch.float32), (3, torch.float32), (None, torch.bfloat16)])
def test_attention_is_the_softmax_within_each_record(window: int | None, dtype: torch.dtype) -> None:
    """Output and gradients are those of softmax(q k / sqrt(E)) v over the same record's last `window` tokens."""
    torch.manual_seed(0)
    cu_seqlens, heads, groups, size = [0, 4, 5, 11], 4, 2, 8
    query = torch.randn(1, heads, 11, size, requires_grad=True)
    key, value = (torch.randn(1, groups, 11, size, requires_grad=True) for _ in range(2))
    result, _ = packed_attention(
        torch.nn.Module(),
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        None,
        scaling=size**-0.5,
        sliding_window=window,
        records=Records([4, 1, 6]),
    )
    outputs = []
    for t in range(11):
        first = max(start for start in cu_seqlens if start <= t)
        first = first if window is None else max(first, t - window + 1)
        for h in range(heads):
            g = h // (heads // groups)
            weights = (key[0, g, first : t + 1] @ query[0, h, t] / size**0.5).softmax(0)
            outputs.append(weights @ value[0, g, first : t + 1])
    expected = torch.stack(outputs).view(1, 11, heads, size)
    rtol, atol = (1e-5, 1e-5) if dtype == torch.float32 else (0.02, 0.03)
    torch.testing.assert_close(result.float(), expected, rtol=rtol, atol=atol)
    direction = torch.randn_like(expected)
    inputs = (query, key, value)
    gradients = torch.autograd.grad((result.float() * direction).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), inputs)
    torch.testing.assert_close(gradients, expected_gradients, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("window", "dtype"), [(3, torch.float32), (None, torch.bfloat16)])
def test_values_may_have_another_head_size(window: int | None, dtype: torch.dtype) -> None:
    """As in multi-head latent attention: the output is that for values with zeros added, without them."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 11, size, dtype=dtype) for heads, size in ((4, 12), (2, 12), (2, 8)))
    rest: dict[str, Any] = {"sliding_window": window, "records": Records([4, 1, 6])}
    result, _ = packed_attention(torch.nn.Module(), query, key, value, None, **rest)
    padded, _ = packed_attention(torch.nn.Module(), query, key, torch.nn.functional.pad(value, (0, 4)), None, **rest)
    assert result.shape == (1, 11, 4, 8)
    torch.testing.assert_close(result, padded[..., :8], rtol=1e-2, atol=1e-2)
    assert not padded[..., 8:].any()


@pytest.mark.parametrize(
    ("mask", "rest", "obstacle"),
    [
        (torch.zeros(1, 1, 11, 11), {}, "attention with a mask of its own"),
        (None, {"softcap": 30.0}, "attention with softcap"),
        (None, {"is_causal": False}, "attention that is not causal"),
    ],
)
def test_what_a_packed_pass_would_leave_out_is_refused(
    mask: Tensor | None, rest: dict[str, Any], obstacle: str
) -> None:
    """Rather than dropped in silence."""
    query, key, value = (torch.randn(1, heads, 11, 8) for heads in (4, 2, 2))
    with pytest.raises(NotImplementedError, match=obstacle):
        packed_attention(torch.nn.Module(), query, key, value, mask, records=Records([4, 7]), **rest)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record longer than a block, in bfloat16 on a CPU, is attended to as in one block."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 11, 8, dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2))
    result = []
    for block in (11, 4):
        monkeypatch.setattr(attention, "BLOCK", block)
        output, _ = packed_attention(torch.nn.Module(), query, key, value, None, records=Records([11]))
        result.append((output, *torch.autograd.grad(output.float().square().sum(), (query, key, value))))
    torch.testing.assert_close(result[1], result[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("architecture", get_args(Architecture))
def test_prompts_read_together_have_windows_of_their_own(architecture: Architecture, folder_of: Folders) -> None:
    """Each text continues as without a cache, although a prompt is longer than the window."""
    settings = BackboneSettings(model=str(folder_of(architecture)), dtype="float32", device="cpu")
    model = load(settings, outline(settings)).model
    lora = HeadLoraConfig(num_heads=1, num_experts=1, top_k=None, gate="none", router_gradient="none")
    prompts = [Prompt(record) for record in RECORDS]
    texts = run_to_end(decode(attach(model, lora, 0), prompts, [6] * 6, frozenset(), torch.device("cpu")))
    assert texts == [greedy(model, prompt.ids, 6) for prompt in prompts]
