"""Choice of the next token: the nucleus by its definition, and a generator of its own."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import NucleusSampler, decode, most_likely
from streamlearn.learner.learner import Learner
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples

CPU = torch.device("cpu")
DRAWS = 20_000
LOGITS = torch.tensor([1.0, 3.0, -2.0, 2.5, 0.0])


def nucleus(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Eq. (1) and (2), token by token."""
    p = (logits / temperature).softmax(-1)
    kept, total = torch.zeros_like(p), 0.0
    for token in p.argsort(descending=True).tolist():
        kept[token] = p[token]
        total += float(p[token])
        if total >= top_p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9), (2.0, 0.6), (1.0, 0.5)])
def test_tokens_are_drawn_as_often_as_the_equations_say(temperature: float, top_p: float) -> None:
    """Tokens outside of the nucleus never."""
    sampler = NucleusSampler(temperature, top_p, seed=1, device=CPU)
    found = sampler(LOGITS.expand(DRAWS, -1)).bincount(minlength=len(LOGITS)) / DRAWS
    expected = nucleus(LOGITS, temperature, top_p)
    assert_close(found, expected, atol=4 * 0.5 / DRAWS**0.5, rtol=0.0)  # four standard errors at p = 0.5
    assert torch.equal(found == 0, expected == 0)


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    """Each of both limits, top_p and temperature to 0, is greedy decoding."""
    logits_BV = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    for sampler in (NucleusSampler(1.0, 0.0, 1, CPU), NucleusSampler(1e-30, 1.0, 1, CPU)):
        assert torch.equal(sampler(logits_BV), most_likely(logits_BV))


def test_a_seed_fixes_the_draws_and_another_changes_them() -> None:
    """Also a negative one."""
    logits_BV = LOGITS.expand(64, -1)
    first, again, other = (NucleusSampler(1.0, 0.95, seed, CPU)(logits_BV) for seed in (-7, -7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_global_random_state_is_neither_read_nor_advanced() -> None:
    """Training draws from it."""
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = NucleusSampler(1.0, 0.95, 1, CPU)(LOGITS.expand(64, -1))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(NucleusSampler(1.0, 0.95, 1, CPU)(LOGITS.expand(64, -1)), first)


def test_a_sampled_text_is_repeated_by_its_seed(learner: Learner) -> None:
    """Bit for bit; another seed gives another text."""
    prompt = Prompt(random_examples([6], seed=3)[0].input_ids.tolist())

    def text(seed: int) -> list[int]:
        choose = NucleusSampler(1.0, 0.9, seed, CPU)
        return run_to_end(decode(learner.model, [prompt], [12], frozenset(), CPU, choose=choose))[0]

    assert text(1) == text(1)
    assert text(1) != text(2)
