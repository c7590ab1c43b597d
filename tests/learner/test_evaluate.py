"""Scores and generated tokens, and that training does not change."""

from collections.abc import Generator
from typing import Any

import pytest
import torch

from streamlearn.learner import evaluate as evaluation
from streamlearn.learner.evaluate import run_to_end, score
from streamlearn.learner.generate import decode
from streamlearn.learner.learner import Learner
from streamlearn.stream.record import Prompt
from tests.doubles import random_examples
from tests.learner.reference import token_losses, train
from tests.learners import MakeLearner, same, snapshot

CPU = torch.device("cpu")

EXAMPLES = (*random_examples([9, 4, 12], prompt_length=2), *random_examples([7, 3], seed=1))

TOKENS = [e.input_ids.tolist() for e in random_examples([5, 1, 9, 5, 3], seed=2)]

PROMPTS = [Prompt(ids) for ids in TOKENS]

NEVER: frozenset[int] = frozenset()


def scores_of(learner: Learner, *, pack_tokens: int = 64) -> list[evaluation.ExampleScore]:
    return run_to_end(score(learner.model, EXAMPLES, CPU, pack_tokens=pack_tokens))


def test_scores_equal_those_of_each_example_separately(learner: Learner) -> None:
    """Sums, hits and counts are those of one pass per example, in the given order."""
    result = scores_of(learner)
    for figures, one in zip(result, EXAMPLES, strict=True):
        losses, hits = token_losses(learner.forward, one)
        assert figures.loss_sum == pytest.approx(sum(losses), rel=1e-4)
        assert (figures.correct, figures.tokens) == (sum(hits), len(losses))


@pytest.mark.parametrize(("pack_tokens", "pieces"), [(1000, 1), (16, 3), (1, 5)])
def test_forward_passes_are_bounded(learner: Learner, pack_tokens: int, pieces: int) -> None:
    """Work yields once per pass, an overlong example gets its own, and the figures do not depend on the grouping."""
    work = score(learner.model, EXAMPLES, CPU, pack_tokens=pack_tokens)
    assert sum(1 for _ in work) == pieces
    for result, expected in zip(scores_of(learner, pack_tokens=pack_tokens), scores_of(learner), strict=True):
        assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4)
        assert (result.correct, result.tokens) == (expected.correct, expected.tokens)


def test_evaluation_changes_no_bit_of_training(make_learner: MakeLearner) -> None:
    """Scoring and decoding between steps change neither weights, optimizer, expert loads nor random state."""
    plain, evaluated = make_learner(), make_learner()
    for step in range(3):
        train(plain, [step])
        train(evaluated, [step])
        before = torch.get_rng_state()
        routed = [group.load_HK.clone() for group in evaluated.optimizer.groups if group.load_HK is not None]
        with evaluated.pin().swapped_in():
            scores_of(evaluated)
            run_to_end(decode(evaluated.model, PROMPTS, [3] * len(PROMPTS), NEVER, CPU))
        assert torch.equal(torch.get_rng_state(), before)
        after = [group.load_HK for group in evaluated.optimizer.groups if group.load_HK is not None]
        assert all(torch.equal(one, other) for one, other in zip(routed, after, strict=True))
        assert all(parameter.grad is None for parameter in evaluated.optimizer.parameters())
    assert same(snapshot(plain), snapshot(evaluated))


def interleaved(learner: Learner, work: Generator[None, None, Any]) -> Any:
    """Run a job with a training step after each forward pass."""
    pinned, number = learner.pin(), 50
    while True:
        with pinned.swapped_in():
            try:
                next(work)
            except StopIteration as finished:
                return finished.value
        train(learner, [number])
        number += 1


def test_a_job_between_training_steps_sees_the_weights_of_its_start(learner: Learner) -> None:
    """Scores and texts computed between training steps are bit-equal to those computed without a break."""
    expected_scores = scores_of(learner, pack_tokens=12)
    limits = [6] * len(PROMPTS)
    expected_texts = run_to_end(decode(learner.model, PROMPTS, limits, NEVER, CPU))
    start = snapshot(learner)
    assert interleaved(learner, score(learner.model, EXAMPLES, CPU, pack_tokens=12)) == expected_scores
    assert not same(snapshot(learner), start)
    assert scores_of(learner, pack_tokens=12) != expected_scores  # the weights did change
    texts = run_to_end(decode(learner.model, PROMPTS, limits, NEVER, CPU))
    assert interleaved(learner, decode(learner.model, PROMPTS, limits, NEVER, CPU)) == texts
    assert texts != expected_texts
