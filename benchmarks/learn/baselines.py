"""Methods that are given the task boundaries, on the daemon's adapter, optimizer and batches: replay and penalties.

`lora_baselines` has those with a LoRA per task.
"""
# Shape suffixes: L learned tokens, K logits kept of each, P parameters.

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from torch.nn import Parameter

from streamlearn.adapters.context import routing_context
from streamlearn.baselines.consolidate import BaselineHooks
from streamlearn.learner.learner import Learner, Step
from streamlearn.learner.loss import pack, packed_logits, packed_loss
from streamlearn.learner.optimizer import Group, Hold, MaskedAdamW
from streamlearn.regimes.regimes import Regimes
from streamlearn.settings import Settings, StreamSettings
from streamlearn.shift.detector import Shift
from streamlearn.stream.intake import Batcher
from streamlearn.stream.position import TopicPartition
from streamlearn.stream.record import Example, Record

T = TypeVar("T")
FISHER_RECORDS = 64
"""Number of records per task for the Fisher information."""
RIDGE = 1e-6
"""Multiple of the mean |g_k|^2 added to the diagonal of G G^T, which near-parallel gradients make singular."""


@dataclass(frozen=True)
class BaselineContext:
    """What a baseline is built from: the run's learner and settings, and the stream's segments."""

    learner: Learner
    settings: Settings
    slots: Sequence[Sequence[int]]
    """The regime slots of the records of each segment, see `Suite.regime_slots`."""
    records: int
    """Training records of all passes together."""
    adaptation: Regimes | None = None
    """The daemon's handling of regimes, for methods that use it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The arm's changes in the section `baseline`: keyword arguments of the baseline, by name."""

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def memory_records(self) -> int:
        """Number of records that the daemon would keep as hold-out: the budget of every replay memory."""
        return self.settings.holdout.records_per_regime * len({slot for own in self.slots for slot in own})


def batches(examples: Sequence[Example], settings: StreamSettings) -> Iterator[Sequence[Example]]:
    """Yield the batches that the daemon would make of the examples."""
    batcher, origin = Batcher(settings), TopicPartition("segment", 0)
    for offset, example in enumerate(examples):
        for batch in batcher.add(Record(origin, offset, None), example):
            yield batch.examples
    for batch in batcher.flush():
        yield batch.examples


class Baseline:
    """Sequential training without any further mechanism (SeqLoRA when the adapter is one LoRA)."""

    def __init__(self, context: BaselineContext) -> None:
        self.context = context
        self.learner = context.learner

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Start a segment; `examples` are all its records."""
        del segment, examples
        hooks = self.learner.hooks
        if isinstance(hooks, BaselineHooks) and hooks.stages is not None:  # a baseline has no regimes to anchor
            hooks.stages.steps = 0

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on one batch and return the losses of these records from before the update."""
        return self.learner.step(examples)

    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """End a segment; `examples` are all its records."""


class CosineSchedule(Baseline):
    """Plain training with a cosine schedule, which needs the length of the stream.

        lr(n) = lr (1 + cos(pi n / N)) / 2                                                     (1)

    Loshchilov and Hutter 2017 without restarts; n of N records have been trained on before the step.
    """

    def __init__(self, context: BaselineContext) -> None:
        super().__init__(context)
        self._done = 0

    def step(self, examples: Sequence[Example]) -> Step:
        scale = (1 + math.cos(math.pi * self._done / self.context.records)) / 2
        for group in self.learner.optimizer.groups:
            group.lr_scale = scale
        self._done += len(examples)
        return self.learner.step(examples)


class StagedTraining(Baseline):
    """MoT's three stages, scaled to the segment: each segment passes through all of them.

    The paper's runs on text take 50, 150 and 100 of 300 epochs (arXiv 2605.29757, figures 5 and 6), that is 1/6, 1/2
    and 1/3 of training; fixed numbers of steps would end in an earlier stage on a short segment.
    """

    def __init__(self, context: BaselineContext, ffn_share: float = 1 / 6, attention_share: float = 1 / 2) -> None:
        super().__init__(context)
        self._shares = {"ffn_steps": ffn_share, "attention_steps": attention_share}

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Restart the stages; each has at least one step."""
        super().begin(segment, examples)
        hooks = self.learner.hooks
        assert isinstance(hooks, BaselineHooks), "the preset trains in stages"
        assert hooks.stages is not None, "the preset trains in stages"
        steps = sum(1 for _ in batches(examples, self.context.settings.stream))
        lengths = {name: max(1, round(share * steps)) for name, share in self._shares.items()}
        hooks.stages.settings = self.context.settings.learner.model_copy(update=lengths)


class OracleRegimes(Baseline):
    """A preset with perfect detection: entering, probing and consolidation at the true boundaries.

    As `cp-moe`, simplified: it adapts the linears of the MLP and not those of attention; the stream is read once
    instead of in five epochs, at a constant rate instead of a cosine; and the warm-up of the transient expert is as
    long as the profile says (10,000 tokens in the paper).
    """

    def __init__(self, context: BaselineContext) -> None:
        super().__init__(context)
        self._entered: list[int] = []
        """Slots in the order in which they were entered."""
        self._slots: Iterator[int] = iter(())
        """Slots of the segment's records that are still to come."""

    def begin(self, segment: int, examples: Sequence[Example]) -> None:
        """Enter the segment's regime, or, of a mixture, its new ones; a new one is probed with its first records."""
        own = self.context.slots[segment]
        self._slots = iter(own)
        present = dict.fromkeys(own)
        for slot in present:
            if len(present) == 1 or slot not in self._entered:
                records = [example for example, regime in zip(examples, own, strict=True) if regime == slot]
                self._enter(slot, records)

    def _enter(self, slot: int, examples: Sequence[Example]) -> None:
        shift = Shift(
            kind="inputs",
            number=len(self._entered) + 1,
            regime=slot + 1,
            slot=slot,
            known=slot in self._entered,
            previous=self._entered[-1] + 1 if self._entered else None,
            declared_at=0,
            onset=0,
            statistic=0.0,
            threshold=0.0,
        )
        assert self.context.adaptation is not None
        self.context.adaptation.enter(shift, self._warmup(examples))
        self._entered.append(slot)

    def step(self, examples: Sequence[Example]) -> Step:
        return self.learner.step(examples, list(islice(self._slots, len(examples))))

    def _warmup(self, examples: Sequence[Example]) -> list[Example]:
        taken: list[Example] = []
        while len(taken) < len(examples) and sum(map(len, taken)) < (self.context.settings.probe.warmup_tokens or 0):
            taken.append(examples[len(taken)])
        return taken


class Reservoir(Generic[T]):
    """A uniform sample of bounded size of all items offered so far (Vitter 1985, algorithm R)."""

    def __init__(self, capacity: int, *, seed: int) -> None:
        self.items: list[T] = []
        self._capacity = capacity
        self._seen = 0
        self._random = random.Random(seed)

    def offer(self, item: T) -> None:
        self._seen += 1
        if len(self.items) < self._capacity:
            self.items.append(item)
        elif (place := self._random.randrange(self._seen)) < self._capacity:
            self.items[place] = item

    def draw(self, num: int) -> list[T]:
        """Draw up to `num` different items."""
        return self._random.sample(self.items, min(num, len(self.items)))


class Replay(Baseline):
    """Experience replay: each batch is extended by as many records drawn from a reservoir sample of the stream.

    Chaudhry et al. 2019, "On Tiny Episodic Memories in Continual Learning", algorithm 1.
    """

    def __init__(self, context: BaselineContext) -> None:
        super().__init__(context)
        self.memory: Reservoir[Example] = Reservoir(context.memory_records, seed=context.seed)

    def step(self, examples: Sequence[Example]) -> Step:
        step = self.learner.step([*examples, *self.memory.draw(len(examples))])
        for example in examples:
            self.memory.offer(example)
        return only_first(step, len(examples))


def only_first(step: Step, num: int) -> Step:
    """Return the step with the losses of its first `num` records only: those of the stream."""
    return replace(step, record_losses=step.record_losses[:num], record_correct=step.record_correct[:num])


@dataclass(frozen=True)
class Remembered:
    """A record of DER++'s memory."""

    example: Example
    tokens_LK: Tensor
    """Vocabulary ids of the kept logits, int32."""
    logits_LK: Tensor
    """z of eq. (1), float32."""


class DarkReplay(Baseline):
    """Dark experience replay (DER++): replay of records together with the logits that the model had for them.

        L = L(batch) + alpha E_(x, z)~M [ mean (z - h(x))^2 ] + beta E_(x, y)~M [ L(x, y) ]       (1)

    Buzzega et al. 2020, eq. 6; both terms draw their own records from the memory M, a reservoir sample, as many as the
    batch has. z are the logits under the weights that the record was first trained on.

    Simplified: logits are kept for answer tokens only, and of these the `top` largest (a token and its logit take eight
    bytes); the square in (1) is averaged over them. The full logits of one answer token take as many bytes as dozens of
    records. The memory holds as many records as that of `Replay`, as in the paper's comparison, so their logits come on
    top of its bytes.
    """

    def __init__(self, context: BaselineContext, alpha: float = 0.1, beta: float = 0.5, top: int = 16) -> None:
        super().__init__(context)
        self.memory: Reservoir[Remembered] = Reservoir(context.memory_records, seed=context.seed)
        self._alpha, self._beta, self._top = alpha, beta, top

    def step(self, examples: Sequence[Example]) -> Step:
        """Train on eq. (1), then offer the batch with its logits from before the update to the memory."""
        offered = self._with_logits(examples)
        dark, plain = self.memory.draw(len(examples)), self.memory.draw(len(examples))
        step = self.learner.step(examples, penalty=(lambda: self._replayed(dark, plain)) if dark else None)
        for remembered in offered:
            self.memory.offer(remembered)
        return step

    def _replayed(self, dark: Sequence[Remembered], plain: Sequence[Remembered]) -> Tensor:
        """The second and third term of eq. (1)."""
        packed = pack([remembered.example for remembered in dark], self.learner.device)
        with routing_context(self.learner.model, packed.context(explore=True)):
            logits_LV = packed_logits(self.learner.forward, packed)
        tokens_LK = torch.cat([remembered.tokens_LK for remembered in dark]).long()
        before_LK = torch.cat([remembered.logits_LK for remembered in dark])
        distance = (logits_LV.gather(1, tokens_LK) - before_LK).square().mean()
        packed = pack([remembered.example for remembered in plain], self.learner.device)
        with routing_context(self.learner.model, packed.context(explore=True)):
            loss = packed_loss(self.learner.forward, packed).mean
        return self._alpha * distance + self._beta * loss

    @torch.no_grad()
    def _with_logits(self, examples: Sequence[Example]) -> list[Remembered]:
        packed = pack(examples, self.learner.device)
        with routing_context(self.learner.model, packed.context()):
            kept = packed_logits(self.learner.forward, packed).topk(self._top)
        counts = [example.num_learned for example in examples]
        parts = zip(examples, torch.split(kept.indices.int(), counts), torch.split(kept.values, counts), strict=True)
        return [Remembered(example, tokens_LK.clone(), logits_LK.clone()) for example, tokens_LK, logits_LK in parts]


def fisher(learner: Learner, examples: Sequence[Example]) -> list[Tensor]:
    """Return the diagonal of the empirical Fisher information for each parameter of the optimizer, in its order.

        F = mean over records of (d log p(answer | prompt) / d theta)^2                        (1)

    (1) needs the gradient of each single record; the squared gradient of a batch mean is a different quantity. log p is
    the sum over the answer tokens, so that a record with a long answer weighs far more than one with a label.
    """
    parameters = learner.optimizer.parameters()
    squares = [torch.zeros_like(parameter) for parameter in parameters]
    for example in examples:
        packed = pack([example], learner.device)
        with torch.enable_grad(), routing_context(learner.model, packed.context()):
            log_likelihood = packed_loss(learner.forward, packed).mean * len(packed.target_L)
        gradients = torch.autograd.grad(log_likelihood, parameters)
        for square, gradient in zip(squares, gradients, strict=True):
            square.addcmul_(gradient, gradient, value=1 / len(examples))
    return squares


def normalized(information: Sequence[Tensor]) -> list[Tensor]:
    """Return F / mean F over all parameters, unchanged if all information is zero.

    It gives every task the same weight, as Schwarz et al. 2018 do for online EWC.
    """
    mean = torch.stack([part.sum() for part in information]).sum() / sum(part.numel() for part in information)
    return [part / mean if mean > 0 else part for part in information]


class Ewc(Baseline):
    """Elastic weight consolidation, with a penalty per task.

        L = L_task + (lambda / 2) sum_t F_t (theta - theta*_t)^2                                (1)

    Kirkpatrick et al. 2017, eq. 3, with one penalty per earlier task. F_t is the normalized `fisher` information, so
    that lambda has the same meaning for all tasks and backbones. A sum of quadratics is one quadratic around a weighted
    mean, which the optimizer accepts:

        sum_t F_t (theta - theta*_t)^2 = F (theta - a)^2 + const,  F = sum_t F_t,  a = sum_t F_t theta*_t / F  (2)
    """

    def __init__(self, context: BaselineContext, strength: float = 0.1) -> None:
        super().__init__(context)
        self._strength = strength
        self._weighted = {id(parameter): torch.zeros_like(parameter) for _, _, parameter in self._parameters()}

    @torch.no_grad()
    def end(self, segment: int, examples: Sequence[Example]) -> None:
        """Add the segment's Fisher information to the penalty."""
        generator = torch.Generator().manual_seed(self.context.seed * 1009 + segment)
        picked = torch.randperm(len(examples), generator=generator)[:FISHER_RECORDS].tolist()
        information = normalized(fisher(self.learner, [examples[i] for i in picked]))
        for (group, name, parameter), task_fisher in zip(self._parameters(), information, strict=True):
            group.holds[name] = self._hold(group.holds.get(name), parameter, task_fisher)

    def _hold(self, before: Hold | None, parameter: Parameter, task_fisher: Tensor) -> Hold:
        """The penalty after this task, eq. (2)."""
        total = task_fisher if before is None else task_fisher + before.importance
        weighted = self._weighted[id(parameter)].addcmul_(task_fisher, parameter)
        return Hold(total, torch.where(total > 0, weighted / total, parameter), self._strength / 2)

    def _parameters(self) -> Iterator[tuple[Group, str, Parameter]]:
        for group in self.learner.optimizer.groups:
            for name, parameter in group.parameters.items():
                yield group, name, parameter


class OnlineEwc(Ewc):
    """Online EWC: one penalty for all tasks.

        L = L_task + (lambda / 2) F* (theta - theta*)^2,  F* <- gamma F* + F_t, theta* the newest  (1)

    Schwarz et al. 2018, section 4.
    """

    def __init__(self, context: BaselineContext, strength: float = 0.1, gamma: float = 0.95) -> None:
        super().__init__(context, strength)
        self._gamma = gamma

    def _hold(self, before: Hold | None, parameter: Parameter, task_fisher: Tensor) -> Hold:
        total = task_fisher if before is None else self._gamma * before.importance + task_fisher
        return Hold(total, parameter.detach().clone(), self._strength / 2)


class Gem(Baseline):
    """Gradient episodic memory: no step may raise the loss on the stored records of an earlier task.

        minimize 1/2 |g - z|^2  subject to  <z, g_k> >= 0 for every earlier task k             (1)
        z = G^T v + g,  v = argmin_{v >= 0} 1/2 v^T G G^T v + g^T G^T v                        (2)

    Lopez-Paz and Ranzato 2017, eq. 8 and 11; the rows of G are the gradients g_k. (2) is a non-negative least squares
    problem. The gradient is clipped before it is projected; (1) is homogeneous in g, so the order does not matter. The
    memory holds the last records of each segment.

    Simplified: the projected gradient is the input of AdamW, as in all methods here, so (1) holds for what the
    optimizer is given and not exactly for its step.
    """

    def __init__(self, context: BaselineContext) -> None:
        super().__init__(context)
        self.memory: list[list[Example]] = []
        self._optimizer = ProjectedAdamW(self.learner.optimizer.groups, context.settings.learner)
        self.learner.optimizer = self._optimizer

    def step(self, examples: Sequence[Example]) -> Step:
        self._optimizer.references = [self._gradient(stored) for stored in self.memory]
        return self.learner.step(examples)

    def end(self, segment: int, examples: Sequence[Example]) -> None:
        del segment
        self.memory.append(list(examples[-self.context.settings.holdout.records_per_regime :]))

    def _gradient(self, examples: Sequence[Example]) -> Tensor:
        packed = pack(examples, self.learner.device)
        parameters = self.learner.optimizer.parameters()
        with routing_context(self.learner.model, packed.context()):
            loss = packed_loss(self.learner.forward, packed).mean
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


class ProjectedAdamW(MaskedAdamW):
    """`MaskedAdamW` on gradients projected by (2)."""

    references: Sequence[Tensor] = ()
    """The g_k."""

    @torch.no_grad()
    def step(self, lr: float) -> None:
        parameters = [p for p in self.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.references and len(parameters) == len(self.parameters()):
            allowed = project(torch.cat([g.flatten() for g in gradients]), torch.stack(list(self.references)))
            for gradient, part in zip(gradients, torch.split(allowed, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))
        super().step(lr)


def project(g: Tensor, G: Tensor) -> Tensor:
    """Return the vector nearest to g (P,) whose product with no row of G (K, P) is negative, eq. (2) of `Gem`."""
    if bool((G @ g >= 0).all()):
        return g
    gram = (G @ G.T).double().cpu().numpy()
    gram += RIDGE * np.trace(gram) / len(gram) * np.eye(len(gram))
    lower = np.linalg.cholesky(gram)  # 1/2 |L^T v + L^-1 G g|^2 has the gradient of (2)
    v, _ = nnls(lower.T, -np.linalg.solve(lower, (G @ g).double().cpu().numpy()))
    return g + torch.from_numpy(v).to(g) @ G
