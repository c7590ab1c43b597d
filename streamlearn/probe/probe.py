"""Looking at a new regime before anything is learned from it.

    1. a zero-effect transient expert is put beside the frozen model;                          CP-MoE section 3.2.1
    2. it is trained on the first records of the regime, in several small steps;               eq. 5
    3. its path tells which weights mattered;                                                  eq. 6, 7
    4. on the same tokens its activations are compared with every stable expert's;             eq. 9
    5. it is thrown away.

The model is as it was before; what remains is the report. Eq. 5 is plain gradient descent; here its steps are Adam's,
since ten steps of plain descent from B = 0 go nowhere. Eq. 6 holds along any path, Theorem 1 along eq. 5's alone.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from streamlearn.adapters.routing_context import routing_context
from streamlearn.learner.importance import PathIntegral
from streamlearn.learner.learner import Learner
from streamlearn.learner.loss import packed_loss
from streamlearn.learner.optimizer import Group, MaskedAdamW
from streamlearn.learner.packing import pack
from streamlearn.probe.transient import TransientExpert
from streamlearn.settings import ConsolidateSettings, LearnerSettings, ProbeSettings
from streamlearn.stream.decode import Example

STEPS = 10  # the warm-up tokens are cut into so many rows, or fewer when records are long


@dataclass(frozen=True)
class ProbeReport:
    """What a transient expert found."""

    similarity: Mapping[str, Tensor]
    """CKA by bank, (H, K) in [0, 1]."""
    importance: Mapping[str, Tensor]
    """Omega by parameter, BANK.A and BANK.B, in the coordinates of the stable experts; empty when not asked for."""
    losses: tuple[float, ...]
    """Of each warm-up step, nats per learned token."""
    tokens: int
    """Tokens it was trained on."""
    seconds: float
    """What it took."""


def probe(
    learner: Learner,
    examples: Sequence[Example],
    settings: ProbeSettings,
    consolidate: ConsolidateSettings,
    *,
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> ProbeReport:
    """Probe with at least one example; a function of the arguments and of the weights as they stand."""
    started = clock()
    # 1.
    expert = TransientExpert(learner.banks, consolidate.coordinates, seed)
    parameters = expert.parameters()
    group = [Group(bank.name, {"A": expert.A[bank.name], "B": expert.B[bank.name]}, None) for bank in learner.banks]
    optimizer = MaskedAdamW(group, LearnerSettings(lr=settings.lr, weight_decay=0.0))
    path = PathIntegral(parameters) if consolidate.importance == "transient" else None
    # 2.
    assert settings.warmup_tokens is not None, "settled when the backbone was known"
    rows = list(_rows(examples, settings.warmup_tokens // STEPS))
    losses = []
    with _frozen(learner):
        for chosen in rows:
            packed = pack(chosen, learner.device)
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
        tokens=sum(len(example) for chosen in rows for example in chosen),
        seconds=clock() - started,
    )


def _compare(learner: Learner, expert: TransientExpert, examples: Sequence[Example], tokens: int) -> None:
    chosen = next(_rows(examples, tokens))
    packed = pack(chosen, learner.device)
    context = packed.context()
    expert.comparing, context.parallel_adapter = True, expert
    with torch.no_grad(), routing_context(learner.model, context):
        packed_loss(learner.forward, packed)


def _rows(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """Neighbours of together at least `tokens` tokens; the last row takes what is left."""
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
    """Inside, nothing of the learner is differentiated; what experts got in the last step stays as it was."""
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
