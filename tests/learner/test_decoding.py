"""Generated tokens: those of the definition, for each text separately."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from streamlearn.learner import generate as decoding
from streamlearn.learner.evaluate import run_to_end
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples
from tests.learner.reference import greedy, train
from tests.learners import MakeLearner

CPU = torch.device("cpu")
TOKENS = [e.input_ids.tolist() for e in random_examples([5, 1, 9, 5, 3], seed=2)]
PROMPTS = [Prompt(ids) for ids in TOKENS]
NEVER: frozenset[int] = frozenset()


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_decoding_together_equals_each_prompt_separately(learner: Learner, batch: int) -> None:
    """Prompts of different lengths, padded and cached, continue as each does separately, in the given order."""
    found = run_to_end(decode(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU, max_prompts=batch))
    assert found == [greedy(learner.forward, prompt, 8) for prompt in TOKENS]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)  # the texts depend on the prompts


def test_decoding_equals_transformers_generate(learner: Learner) -> None:
    """The tokens are those of `generate(do_sample=False)` for each prompt."""
    found = run_to_end(decode(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU))
    for tokens, prompt in zip(found, TOKENS, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = learner.forward.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=None
            )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_decoding_ends_before_a_stop_token(learner: Learner) -> None:
    """The first stop token ends a text and is not part of it; the other texts continue."""
    whole = [greedy(learner.forward, prompt, 8) for prompt in TOKENS]
    stop = frozenset({whole[0][3], whole[2][1]})
    found = run_to_end(decode(learner.model, PROMPTS, [8] * len(PROMPTS), stop, CPU))
    assert found == [greedy(learner.forward, prompt, 8, stop) for prompt in TOKENS]
    assert len(found[0]) <= 3
    assert max(map(len, found)) > min(map(len, found))


def test_each_text_has_its_own_limit(learner: Learner) -> None:
    """A limit of zero gives no tokens; work ends with the longest text."""
    limits = [0, 5, 2, 1, 0]
    found = run_to_end(decode(learner.model, PROMPTS, limits, NEVER, CPU))
    assert found == [greedy(learner.forward, p, n) for p, n in zip(TOKENS, limits, strict=True)]
    assert list(map(len, found)) == limits
    assert sum(1 for _ in decode(learner.model, PROMPTS, limits, NEVER, CPU)) == max(limits)


@pytest.mark.parametrize("preset", ["streamlearn", "mot"])
@pytest.mark.parametrize("per_check", [1, 3, 8])
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

    found = run_to_end(decode(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU, on_token=on_token, max_prompts=2))
    assert found == received == [tokens[: 2 + index] for index, tokens in enumerate(whole)]


def test_tokens_are_chosen_from_the_logits_of_the_model(learner: Learner) -> None:
    """The second most likely token instead of the first, at the prompt's end and after every token."""

    def second(logits_BV: Tensor) -> Tensor:
        return logits_BV.topk(2).indices[:, 1]

    [found] = run_to_end(decode(learner.model, PROMPTS[:1], [4], NEVER, CPU, choose=second))
    for length, token in enumerate(found):
        ids = torch.tensor([TOKENS[0] + found[:length]])
        with torch.no_grad():
            assert token == int(second(learner.forward(input_ids=ids).logits[0, -1:]))


def test_batches_hold_no_more_than_allowed() -> None:
    """Prompts and texts together, with padding; a prompt that is too long is decoded separately."""
    prompts = [Prompt([1] * length) for length in (2, 3, 4, 50)]
    limits = [4, 4, 6, 1]
    assert list(decoding._batches(range(4), prompts, limits, 3, None)) == [[0, 1, 2], [3]]
    assert list(decoding._batches(range(4), prompts, limits, 9, 20)) == [[0, 1], [2], [3]]


def test_nothing_to_decode_is_no_work(learner: Learner) -> None:
    """Without prompts there are no texts and no forward passes."""
    assert list(decode(learner.model, [], [], NEVER, CPU)) == []
    assert run_to_end(decode(learner.model, [], [], NEVER, CPU)) == []
