"""Generated tokens: those of the definition, for each text separately, and the choice of the next one."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from streamlearn.learner import generate as decoding
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import NucleusSampler, decode, most_likely
from streamlearn.learner.learner import Learner
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples
from tests.learner.reference import greedy, train
from tests.learners import MakeLearner

CPU = torch.device("cpu")

TOKENS = [e.input_ids.tolist() for e in random_examples([5, 1, 9, 5, 3], seed=2)]

PROMPTS = [Prompt(ids) for ids in TOKENS]

NEVER: frozenset[int] = frozenset()


@pytest.mark.parametrize("batch", [2, 16])
def test_decoding_together_equals_each_prompt_separately(learner: Learner, batch: int) -> None:
    """Prompts of different lengths, padded and cached, continue as each does separately, in the given order."""
    result = run_to_end(decode(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU, max_prompts=batch))
    assert result == [greedy(learner.forward, prompt, 8) for prompt in TOKENS]
    assert len({tuple(tokens) for tokens in result}) == len(PROMPTS)  # the texts depend on the prompts


def test_each_text_has_its_own_limit(learner: Learner) -> None:
    """A limit of zero gives no tokens; work ends with the longest text."""
    limits = [0, 5, 2, 1, 0]
    result = run_to_end(decode(learner.model, PROMPTS, limits, NEVER, CPU))
    assert result == [greedy(learner.forward, p, n) for p, n in zip(TOKENS, limits, strict=True)]
    assert list(map(len, result)) == limits
    assert sum(1 for _ in decode(learner.model, PROMPTS, limits, NEVER, CPU)) == max(limits)


@pytest.mark.parametrize("preset", ["streamlearn", "mot"])
@pytest.mark.parametrize("per_check", [1, 3])
def test_finished_texts_leave_the_batch_unnoticed(
    make_learner: MakeLearner, preset: str, per_check: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that end at different times, by limit or stop token, are those decoded one by one."""
    monkeypatch.setattr(decoding, "TOKENS_PER_CHECK", {"cpu": per_check})
    learner = make_learner(preset=preset, lr=3e-2)
    train(learner, range(3))
    slots = None if preset == "mot" else [0, 1, 0, 2, 1]
    limits = [2, 9, 1, 6, 4]

    def texts_of(which: Sequence[int], stop: frozenset[int], max_tokens: int | None = None) -> list[list[int]]:
        chosen = None if slots is None else [slots[i] for i in which]
        prompts, few = [PROMPTS[i] for i in which], [limits[i] for i in which]
        return run_to_end(decode(learner.model, prompts, few, stop, CPU, chosen, max_tokens=max_tokens))

    everything = range(len(PROMPTS))
    stop = frozenset({texts_of([1], NEVER)[0][4]})
    separate = [texts_of([i], stop)[0] for i in everything]
    assert len(separate[1]) <= 4
    assert texts_of(everything, stop) == separate
    assert texts_of(everything, stop, max_tokens=20) == separate


def test_a_listener_receives_every_token_and_may_end_a_text(learner: Learner) -> None:
    """By the index of the prompt; the token at which a text is ended is its last."""
    whole = [greedy(learner.forward, prompt, 8) for prompt in TOKENS]
    received: list[list[int]] = [[] for _ in PROMPTS]

    def on_token(index: int, token: int) -> bool:
        received[index].append(token)
        return len(received[index]) < 2 + index

    result = run_to_end(
        decode(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU, on_token=on_token, max_prompts=2)
    )
    assert result == received == [tokens[: 2 + index] for index, tokens in enumerate(whole)]


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
    result = sampler(LOGITS.expand(DRAWS, -1)).bincount(minlength=len(LOGITS)) / DRAWS
    expected = nucleus(LOGITS, temperature, top_p)
    assert_close(result, expected, atol=4 * 0.5 / DRAWS**0.5, rtol=0.0)  # four standard errors at p = 0.5
    assert torch.equal(result == 0, expected == 0)


def test_a_nucleus_of_nothing_is_the_most_likely_token() -> None:
    """Each of both limits, top_p and temperature to 0, is greedy decoding."""
    logits_BV = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    for temperature, top_p in ((1.0, 0.0), (1e-30, 1.0), (1e-320, 1.0), (1e-320, 0.5)):
        sampler = NucleusSampler(temperature, top_p, 1, CPU)
        assert torch.equal(sampler(logits_BV), most_likely(logits_BV))


def test_only_the_seed_decides_the_draws() -> None:
    """The global random state, from which training draws, is neither read nor advanced."""
    logits_BV = LOGITS.expand(64, -1)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first = NucleusSampler(1.0, 0.95, -7, CPU)(logits_BV)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(NucleusSampler(1.0, 0.95, -7, CPU)(logits_BV), first)
    assert not torch.equal(NucleusSampler(1.0, 0.95, 8, CPU)(logits_BV), first)
