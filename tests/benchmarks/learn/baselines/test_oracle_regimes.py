"""Regimes given at the true boundaries."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.learn.baselines.oracle_regimes import OracleRegimes
from streamlearn.shift.detector import Shift
from tests.benchmarks.learn.baselines.tasks import ONE, TWO
from tests.learners import MakeLearner


def test_each_segment_enters_its_regime(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A regime that returns is known; a new one is probed with the first records up to the warm-up tokens."""
    entered: list[tuple[Shift, int]] = []
    adaptation: Any = SimpleNamespace(enter=lambda shift, examples: entered.append((shift, len(examples))))
    learner = make_learner(preset="streamlearn")
    oracle = OracleRegimes(learner, seed=0, adaptation=adaptation, warmup_tokens=len(ONE[0]) + 1, slots=[0, 1, 0])
    slots: list[list[int]] = []
    monkeypatch.setattr(learner, "step", lambda examples, chosen: slots.append(chosen))
    for segment, examples in enumerate((ONE, TWO, ONE)):
        oracle.begin(segment, examples)
        oracle.step(examples)
    assert [(s.slot, s.regime, s.previous, s.known) for s, _ in entered] == [
        (0, 1, None, False),
        (1, 2, 1, False),
        (0, 1, 2, True),
    ]
    assert [number for _, number in entered] == [2, 2, 2]
    assert slots == [[0] * 3, [1] * 3, [0] * 3]
