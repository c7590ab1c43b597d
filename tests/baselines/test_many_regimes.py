"""A toy stream of 24 regimes that share one expert and need different weights of it, under gradient noise."""

from typing import NamedTuple

import torch
from torch.nn import Parameter

from streamlearn.baselines.importance import RegimeImportance
from streamlearn.learner.importance import Anchors, PathIntegral, SignalIntegral
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.settings import Accumulation, LearnerSettings

# Shape suffixes: R rank, S slice, G regimes.
G, R, OWN = 24, 2, 10
LR, NOISE, STEPS, XI = 1e-2, 0.1, 100, 1e-3


class Outcome(NamedTuple):
    """What a stream of all regimes leaves."""

    last_eight: float
    """Mean loss of each of the last eight regimes, just after it was learned; 1 before."""
    final: float
    """Mean loss of all regimes at the end."""


def learn(strength: float, accumulation: Accumulation = "per_regime") -> Outcome:
    """Each regime pulls its own weights to -1 or 1; the gradient of all others is noise."""
    draw = torch.Generator().manual_seed(0)
    target_RS = torch.randn(R, G * OWN, generator=draw).sign()
    mask_GS = torch.eye(G).repeat_interleave(OWN, dim=1)
    A, B = Parameter(torch.zeros(1, 1, R, G * OWN)), Parameter(torch.zeros(1, 1, R, 1))
    group = Group("bank", {"A": A, "B": B}, None)
    optimizer = MaskedAdamW([group], LearnerSettings(lr=LR, weight_decay=0.0))
    anchors = Anchors([group], strength, over_rank=accumulation == "per_regime")
    held = anchors.importance()
    path = (PathIntegral if accumulation == "sum" else SignalIntegral)({"bank.A": A, "bank.B": B})
    store = RegimeImportance(held, {"bank": R}, XI)

    def loss(regime: int) -> float:
        away_RS = A.detach()[0, 0] - target_RS
        return float((mask_GS[regime] * away_RS.square()).sum() / (R * OWN))

    learned = []
    for regime in range(G):
        if accumulation == "per_regime":
            store.enter(regime)
        anchors.hold()
        for _ in range(STEPS):
            slope_RS = mask_GS[regime] * (A.detach()[0, 0] - target_RS)
            A.grad = (slope_RS + NOISE * torch.randn(R, G * OWN, generator=draw))[None, None]
            B.grad = torch.zeros_like(B)
            path.before()
            optimizer.step(LR)
            path.after([A.grad, B.grad])
        learned.append(loss(regime))
        found = path.importance(XI)
        if accumulation == "per_regime" and strength:
            store.add(regime, found)
        for name, omega in held.items():
            if accumulation == "sum":
                omega.add_(found[name])
        anchors.move()
        path.restart()
    return Outcome(sum(learned[-8:]) / 8, sum(map(loss, range(G))) / G)


def test_late_regimes_are_learned_and_early_ones_are_kept() -> None:
    """As well as without anchors, and with two thirds of its loss at the end; the published sum has neither."""
    plain, kept, summed = learn(0.0), learn(0.1), [learn(strength, "sum") for strength in (0.01, 0.1)]
    assert kept.last_eight < plain.last_eight + 0.01
    assert kept.final < 2 / 3 * plain.final
    assert all(each.last_eight > 3 * plain.last_eight for each in summed)
    assert all(each.final > 1.5 * plain.final for each in summed)
