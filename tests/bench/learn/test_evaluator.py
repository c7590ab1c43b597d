"""Evaluation of tasks on a tiny backbone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamlearn.bench.learn.evaluator import Evaluator, _token_shares
from streamlearn.bench.learn.suite import Suite
from streamlearn.jobs.results import ExpertsOfRegime
from tests.doubles import random_examples
from tests.learners import MakeLearner


def evaluator(answers: list[str]) -> Evaluator:
    """An evaluator of one task with random examples and the given answers."""
    examples = random_examples([6] * len(answers))
    texts = dict(zip(map(id, examples), answers, strict=True))
    records = {id(example): example for example in examples}
    remaining = iter(list(texts.values()))
    decoder: Any = SimpleNamespace(
        decode_value=lambda key: records[key], text=lambda _: next(remaining), stop=frozenset({0})
    )
    return Evaluator(Suite("s", (), {"t": tuple(records)}), decoder)  # type: ignore[arg-type]


def test_scores_are_means_over_answer_tokens(make_learner: MakeLearner) -> None:
    """Accuracy is a share, loss is near that of a uniform guess."""
    found = evaluator(["a"] * 3).evaluate(make_learner(preset="lora"), ["t"], lambda *_: None)["t"]
    assert 0 <= found.accuracy <= 1
    assert found.loss > 1


@pytest.mark.parametrize(
    ("answers", "expected"),
    [(["yes", "no"] * 3, True), (["yes", "no", "maybe"] * 2, False), ([f"{i % 13}" for i in range(60)], False)],
)
def test_a_task_with_few_answers_is_a_classification(answers: list[str], expected: bool) -> None:
    """At most twelve different answers, with three test records per answer."""
    assert evaluator(answers)._is_classification("t") == expected


def test_without_a_router_there_is_no_expert_usage(make_learner: MakeLearner) -> None:
    """LoRA routes nothing."""
    assert evaluator(["a"] * 3).expert_usage(make_learner(preset="lora"), {}, lambda *_: None) is None


def test_token_shares_sum_to_one_per_head() -> None:
    """A head without tokens has shares of zero."""
    shares = torch.tensor(_token_shares(ExpertsOfRegime(regime=1, holdout_tokens=[[3, 1], [0, 0]])))
    torch.testing.assert_close(shares, torch.tensor([[0.75, 0.25], [0.0, 0.0]]))
