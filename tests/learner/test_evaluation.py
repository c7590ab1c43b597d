"""Scores and generated tokens, and what they must leave alone."""

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from streamlearn.learner import evaluation
from streamlearn.learner.evaluation import PinnedWeights, decode_greedily, prompt_of, reference_of, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.stream.decode import Example, Prompt
from streamlearn.stream.encode import IGNORED
from tests.doubles import example, random_examples
from tests.learners import MakeLearner, same, snapshot

CPU = torch.device("cpu")
EXAMPLES = (*random_examples([9, 4, 12], prompt_length=2), *random_examples([7, 3], seed=1))
TOKENS = [e.input_ids.tolist() for e in random_examples([5, 1, 9, 5, 3], seed=2)]
PROMPTS = [Prompt(ids) for ids in TOKENS]
NEVER: frozenset[int] = frozenset()


@pytest.fixture
def learner(make_learner: MakeLearner) -> Learner:
    """Behind a few steps, so that the adapter has something to say."""
    learner = make_learner(lr=3e-2)
    train(learner, range(4))
    return learner


def train(learner: Learner, steps: Sequence[int]) -> list[float]:
    return [learner.step(random_examples([8, 5], seed=step)).loss for step in steps]


def scores_of(learner: Learner, *, pack_tokens: int = 64) -> list[evaluation.ExampleScore]:
    return run_to_end(score(learner.model, EXAMPLES, CPU, pack_tokens=pack_tokens))


@torch.no_grad()
def figures_alone(model: Any, one: Example) -> tuple[float, int, int]:
    """Loss sum, hits and count of one example from the definition, one token after another."""
    ids = torch.from_numpy(one.input_ids).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    learned = [t for t in range(1, len(ids)) if one.labels[t] != IGNORED]
    loss = sum(-F.log_softmax(logits[t - 1], dim=-1)[ids[t]].item() for t in learned)
    return loss, sum(int(logits[t - 1].argmax()) == int(ids[t]) for t in learned), len(learned)


def greedy_alone(model: Any, prompt: Sequence[int], limit: int, stop: frozenset[int] = NEVER) -> list[int]:
    """The definition: a whole pass for each token, no cache, no neighbours."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if best in stop:
            break
        ids.append(best)
    return ids[len(prompt) :]


def test_scores_equal_each_example_alone(learner: Learner) -> None:
    """Sums, hits and counts are those of a pass over each example on its own, in the order given."""
    found = scores_of(learner)
    for figures, one in zip(found, EXAMPLES, strict=True):
        loss, correct, tokens = figures_alone(learner.forward, one)
        assert figures.loss_sum == pytest.approx(loss, rel=1e-4)
        assert (figures.correct, figures.tokens) == (correct, tokens)


def test_hits_are_counted_for_the_right_example(learner: Learner) -> None:
    """An example that the model itself wrote is all hits; its neighbours' counts do not change."""
    prompt = TOKENS[0]
    written = greedy_alone(learner.forward, prompt, 6)
    own = example([*prompt, *written], prompt_length=len(prompt))
    found = run_to_end(score(learner.model, [EXAMPLES[0], own, EXAMPLES[1]], CPU, pack_tokens=64))
    assert (found[1].correct, found[1].tokens) == (6, 6)
    assert [found[0].correct, found[2].correct] == [figures_alone(learner.forward, e)[1] for e in EXAMPLES[:2]]


@pytest.mark.parametrize(("pack_tokens", "pieces"), [(1000, 1), (16, 3), (1, 5)])
def test_rows_are_cut_at_the_bound(learner: Learner, pack_tokens: int, pieces: int) -> None:
    """One piece of work is one row, an overlong example goes alone, and however rows are cut the figures stay."""
    work = score(learner.model, EXAMPLES, CPU, pack_tokens=pack_tokens)
    assert sum(1 for _ in work) == pieces
    for found, wanted in zip(scores_of(learner, pack_tokens=pack_tokens), scores_of(learner), strict=True):
        assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-4)
        assert (found.correct, found.tokens) == (wanted.correct, wanted.tokens)


def test_evaluation_changes_no_bit_of_training(make_learner: MakeLearner) -> None:
    """Scoring and decoding between steps leave weights, optimizer, routing record and random state as they are."""
    plain, asked = make_learner(), make_learner()
    for step in range(3):
        train(plain, [step])
        train(asked, [step])
        before = torch.get_rng_state()
        routed = [group.routed_HK.clone() for group in asked.optimizer.groups if group.routed_HK is not None]
        with PinnedWeights(asked.optimizer.parameters()).swapped_in():
            scores_of(asked)
            run_to_end(decode_greedily(asked.model, PROMPTS, [3] * len(PROMPTS), NEVER, CPU))
        assert torch.equal(torch.get_rng_state(), before)
        after = [group.routed_HK for group in asked.optimizer.groups if group.routed_HK is not None]
        assert all(torch.equal(one, other) for one, other in zip(routed, after, strict=True))
        assert all(parameter.grad is None for parameter in asked.optimizer.parameters())
    assert same(snapshot(plain), snapshot(asked))


def test_pinned_weights_give_the_very_tensors_back(learner: Learner) -> None:
    """Behind the block, also after an error in it, parameters hold their own memory again."""
    parameters = learner.optimizer.parameters()
    addresses = [parameter.data_ptr() for parameter in parameters]

    def fail() -> None:
        with PinnedWeights(parameters).swapped_in():
            assert [parameter.data_ptr() for parameter in parameters] != addresses
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [parameter.data_ptr() for parameter in parameters] == addresses


def interleaved(learner: Learner, work: Generator[None, None, Any]) -> Any:
    """Run a job with a training step behind each piece."""
    pinned, number = PinnedWeights(learner.optimizer.parameters()), 50
    while True:
        with pinned.swapped_in():
            try:
                next(work)
            except StopIteration as finished:
                return finished.value
        train(learner, [number])
        number += 1


def test_a_job_between_training_steps_sees_the_weights_of_its_start(learner: Learner) -> None:
    """Scores and texts spread over training steps are bit for bit those computed at once."""
    wanted_scores = scores_of(learner, pack_tokens=12)
    limits = [6] * len(PROMPTS)
    wanted_texts = run_to_end(decode_greedily(learner.model, PROMPTS, limits, NEVER, CPU))
    start = snapshot(learner)
    assert interleaved(learner, score(learner.model, EXAMPLES, CPU, pack_tokens=12)) == wanted_scores
    assert not same(snapshot(learner), start)
    assert scores_of(learner, pack_tokens=12) != wanted_scores  # the live weights did move on
    texts = run_to_end(decode_greedily(learner.model, PROMPTS, limits, NEVER, CPU))
    assert interleaved(learner, decode_greedily(learner.model, PROMPTS, limits, NEVER, CPU)) == texts
    assert texts != wanted_texts


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_decoding_side_by_side_equals_each_prompt_alone(
    learner: Learner, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, padded and cached, continue as each does alone, in the order given."""
    monkeypatch.setattr(evaluation, "DECODE_BATCH", rows)
    found = run_to_end(decode_greedily(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU))
    assert found == [greedy_alone(learner.forward, prompt, 8) for prompt in TOKENS]
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)  # the prompts do matter


def test_decoding_equals_transformers_generate(learner: Learner) -> None:
    """The same tokens as `generate(do_sample=False)` gives for each prompt."""
    found = run_to_end(decode_greedily(learner.model, PROMPTS, [8] * len(PROMPTS), NEVER, CPU))
    for tokens, prompt in zip(found, TOKENS, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            wanted = learner.forward.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=None
            )
        assert tokens == wanted[0, len(prompt) :].tolist()


def test_decoding_ends_before_a_stop_token(learner: Learner) -> None:
    """The first stop token ends a text and is left out; its neighbours go on to their own end."""
    whole = [greedy_alone(learner.forward, prompt, 8) for prompt in TOKENS]
    stop = frozenset({whole[0][3], whole[2][1]})
    found = run_to_end(decode_greedily(learner.model, PROMPTS, [8] * len(PROMPTS), stop, CPU))
    assert found == [greedy_alone(learner.forward, prompt, 8, stop) for prompt in TOKENS]
    assert len(found[0]) <= 3
    assert max(map(len, found)) > min(map(len, found))


def test_each_text_has_its_own_limit(learner: Learner) -> None:
    """A limit of zero writes nothing; work ends with the longest that is left."""
    limits = [0, 5, 2, 1, 0]
    found = run_to_end(decode_greedily(learner.model, PROMPTS, limits, NEVER, CPU))
    assert found == [greedy_alone(learner.forward, p, n) for p, n in zip(TOKENS, limits, strict=True)]
    assert list(map(len, found)) == limits
    assert sum(1 for _ in decode_greedily(learner.model, PROMPTS, limits, NEVER, CPU)) == max(limits)


def test_nothing_to_decode_is_no_work(learner: Learner) -> None:
    """No prompts give no texts and no pieces."""
    assert list(decode_greedily(learner.model, [], [], NEVER, CPU)) == []
    assert run_to_end(decode_greedily(learner.model, [], [], NEVER, CPU)) == []


def test_an_example_splits_into_prompt_and_reference() -> None:
    """What stands before the first label is the prompt, the labels are the reference."""
    one = example([10, 11, 12, 13], prompt_length=3)
    assert prompt_of(one).ids == [10, 11, 12]
    assert reference_of(one) == [13]
