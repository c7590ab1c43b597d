"""The probe of a new regime, run before anything is learned from it.

    1. add a transient expert with zero output to the frozen model;                            CP-MoE section 3.2.1
    2. train it on the first records of the regime, in several small steps;                    eq. 5
    3. compute the importance of each weight from its path;                                    eq. 6, 7
    4. compare its activations with those of every stable expert, on the same tokens;          eq. 9
    5. discard it.

The model does not change; the result is the report. Eq. 5 is plain gradient descent; the steps here are Adam's, because
ten steps of gradient descent from B = 0 make no progress. Eq. 6 holds along any path, Theorem 1 only along that of
eq. 5.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from streamlearn.adapters.routing_context import routing_context
from streamlearn.learner.learner import INTEGRALS, Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.learner.packing import pack
from streamlearn.probe.transient import TransientExpert
from streamlearn.settings import ConsolidateSettings, LearnerSettings, ProbeSettings
from streamlearn.stream.decode import Example

STEPS = 10
"""Maximum number of warm-up steps; long records make it fewer."""


@dataclass(frozen=True)
class ProbeReport:
    """Result of a probe."""

    similarity: Mapping[str, Tensor]
    """CKA of each stable expert by bank, (H, K) in [0, 1]."""
    importance: Mapping[str, Tensor]
    """Omega by parameter (`BANK.A`, `BANK.B`), of the shape of `Anchors.importance`; empty unless
    `consolidate.importance` is `transient`."""
    losses: tuple[float, ...]
    """Loss of each warm-up step, nats per learned token."""
    tokens: int
    """Warm-up tokens."""


def probe(
    learner: Learner,
    examples: Sequence[Example],
    settings: ProbeSettings,
    consolidate: ConsolidateSettings,
    *,
    seed: int,
) -> ProbeReport:
    """Probe the regime of `examples`.

    The result depends only on the arguments and the current weights.

    Args:
        learner: Its weights, optimizer state and expert loads are the same afterwards.
        examples: First examples of the regime, at least one.
        settings: Warm-up and comparison sizes, learning rate; `warmup_tokens` must be set.
        consolidate: Kind of importance and coordinates of the transient expert.
        seed: Seed of the transient expert.
    """
    # 1.
    expert = TransientExpert(learner.banks, consolidate.coordinates, seed)
    parameters = expert.parameters()
    optimizer = MaskedAdamW(
        [Group(bank.name, {"A": expert.A[bank.name], "B": expert.B[bank.name]}, None) for bank in learner.banks],
        LearnerSettings(lr=settings.lr, weight_decay=0.0),
    )
    path = INTEGRALS[learner.objective.accumulation](parameters) if consolidate.importance == "transient" else None
    # 2.
    assert settings.warmup_tokens is not None, "set from the backbone's default at start-up"
    groups = list(_groups(examples, settings.warmup_tokens // STEPS))
    losses = []
    with _frozen(learner):
        for group in groups:
            packed = pack(group, learner.device)
            context = packed.context()
            context.parallel_adapter = expert
            with routing_context(learner.model, context):
                loss = packed_loss(learner.forward, packed)
            torch.autograd.backward(loss.mean)
            losses.append(float(loss.mean.detach()))
            if path is not None:
                path.before()
            optimizer.step(settings.lr)
            if path is not None:
                path.after([p.grad for p in parameters.values()])
            optimizer.zero_grad()
    # 3.
    importance: Mapping[str, Tensor] = {}
    if path is not None:
        invariant = consolidate.coordinates == "invariant"
        importance = path.rank_invariant(consolidate.damping) if invariant else path.importance(consolidate.damping)
    # 4.
    _compare(learner, expert, examples, settings.similarity_tokens)
    # 5.
    return ProbeReport(
        similarity=expert.similarity(),
        importance=importance,
        losses=tuple(losses),
        tokens=sum(len(example) for group in groups for example in group),
    )


def _compare(learner: Learner, expert: TransientExpert, examples: Sequence[Example], tokens: int) -> None:
    packed = pack(first_tokens(examples, tokens), learner.device)
    context = packed.context()
    expert.comparing, context.parallel_adapter = True, expert
    with torch.no_grad(), routing_context(learner.model, context):
        packed_loss(learner.forward, packed)


def first_tokens(examples: Sequence[Example], tokens: int) -> list[Example]:
    """Return the first examples, at least one, up to at least `tokens` tokens in total."""
    return next(_groups(examples, tokens))


def _groups(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Consecutive examples of at least `tokens` tokens in total; the last group has the rest."""
    group: list[Example] = []
    for example in examples:
        group.append(example)
        if sum(map(len, group)) >= tokens:
            yield group
            group = []
    if group:
        yield group


@contextmanager
def _frozen(learner: Learner) -> Iterator[None]:
    """Disable gradients of the learner's parameters inside the block and restore the expert loads after it."""
    parameters = [p for p in learner.optimizer.parameters() if p.requires_grad]
    loads = [bank.load_HK.clone() if bank.load_HK is not None else None for bank in learner.banks]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
        for bank, load in zip(learner.banks, loads, strict=True):
            if bank.load_HK is not None and load is not None:
                bank.load_HK.copy_(load)
