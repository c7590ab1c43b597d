"""The training step.

    1. test: compute the batch's loss under the weights before the update (prequential loss);
    2. guard: if loss or gradient is not finite, end the step; weights and optimizer state are unchanged;
    3. train: make one MaskedAdamW update.

1 and 3 share one forward and one backward pass: the reported loss is the task loss, the mean over the learned tokens of
the batch. Presets of other methods add terms and change gradients through `Hooks`; the default preset has none.

With `learner.updates_per_batch` a step repeats 2 and 3; only the first update is a test. With `learner.rehearsal` an
update is made with earlier records too: its gradient is of the mean over the learned tokens of all of its records.
"""

import math
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from streamlearn.adapters.context import NO_REGIME, RoutingContext, RoutingHook, Slot, routing_context
from streamlearn.adapters.presets import regime_adapter, slot_of
from streamlearn.adapters.tuner import SHARED, Bank, add_regime, banks, copy_slots, delete_adapter
from streamlearn.adapters.usage import ExpertUsage
from streamlearn.learner import evaluate
from streamlearn.learner.cache import AdapterCache, PinnedWeights
from streamlearn.learner.evaluate import ExampleScore
from streamlearn.learner.loss import PackedBatch, PackedLoss, pack, packed_loss
from streamlearn.learner.memory import checkpoint_layers, slices, with_oom_retry
from streamlearn.learner.optimizer import Group, MaskedAdamW, load_state_dict, parameters_of, state_dict
from streamlearn.settings import LearnerSettings
from streamlearn.stream.record import Example


@dataclass
class PassTotals:
    """Results of a step's forward passes, kept on the device. Only `read` synchronizes with it."""

    means: list[Tensor] = field(default_factory=list)
    """Mean loss of each pass over its learned tokens, scalars."""
    weights: list[float] = field(default_factory=list)
    """Weight of each in the loss of the batch."""
    losses: list[Tensor] = field(default_factory=list)
    """Mean loss of each record of a pass."""
    right: list[Tensor] = field(default_factory=list)
    """Whether each record's learned tokens were all the most probable ones, as 0.0 or 1.0."""

    def add(self, packed: PackedBatch, loss: PackedLoss, weight: float) -> None:
        """Add the pass over one part, whose loss has this weight in the loss of the batch."""
        sums_B, correct_B = loss.per_record(packed)
        self.means.append(loss.mean.detach())
        self.weights.append(weight)
        self.losses.append(sums_B / packed.learned_B)
        self.right.append((correct_B == packed.learned_B).float())

    def read(self, norm: Tensor) -> tuple[float, float, list[float], list[bool]]:
        """Return the batch's loss, the norm, and each record's loss and whether all of its tokens were correct."""
        results = torch.cat([torch.stack(self.means), norm[None], *self.losses, *self.right]).tolist()
        passes, records = len(self.means), sum(map(len, self.losses))
        means, losses, right = results[:passes], results[passes + 1 : -records], results[-records:]
        loss = sum(weight * mean for weight, mean in zip(self.weights, means, strict=True))
        return loss, results[passes], losses, [correct == 1.0 for correct in right]


class Rehearsal(NamedTuple):
    """Earlier records that an update is made with, besides those of the batch."""

    examples: Sequence[Example] = ()
    slots: Sequence[int] = ()
    """Their regime slots, each of which a record of the batch has too."""


@dataclass(frozen=True)
class Step:
    """Result of one training step. All but `seconds` and `ended` is of the first update and the batch's own records."""

    number: int
    """Counted from 1; refused steps are counted too."""
    loss: float
    """Prequential loss: mean over the learned tokens of the batch before the update, nats per token."""
    record_losses: tuple[float, ...]
    """The prequential loss of each record, in batch order."""
    tokens: int
    """All tokens of the batch."""
    learned_tokens: int
    """Tokens that contribute to the loss."""
    grad_norm: float
    """Global norm of the gradient before clipping, rehearsed records included; NaN if the loss was not finite."""
    seconds: float = 0.0
    refusal: str | None = None
    """Why there was no update; None if there was one."""
    record_correct: tuple[bool, ...] = ()
    """Whether every learned token of each record was the most probable one, under the weights before the update."""
    ended: str | None = None
    """Why a further update was not made; the batch is trained on nevertheless."""


class AuxiliaryLoss(RoutingHook, Protocol):
    """A term that one forward pass adds to the task loss; it observes the routing of the pass."""

    def loss(self) -> Tensor:
        """Return the term, a scalar, after the pass."""


@dataclass(frozen=True)
class Probe:
    """Result of `Hooks.probe`."""

    probe_tokens: int
    """Tokens that it read."""
    probe_losses: tuple[float, float]
    """Mean loss of the records of its last steps, without what it trained and with it, nats per learned token."""
    probe_failed: bool
    """Whether the second is not lower, so that nothing of the probe is used."""
    mean_similarity: float
    """Mean CKA of the records' own expert with the experts of the regimes so far."""
    similarity_range: tuple[float, float]
    """Lowest and highest mean CKA of a head, of all layers."""
    mean_importance: float | None
    """Mean importance of a weight; None unless it was measured."""


class Hooks:
    """Extension points of a step and of a shift, for presets other than the default (`baselines`).

    Every method here does nothing.
    """

    def auxiliary_losses(self, packed: PackedBatch, examples: Sequence[Example]) -> Sequence[AuxiliaryLoss]:  # noqa: ARG002
        """Return the terms that the forward pass over `packed` adds to the task loss."""
        return ()

    def before_update(self) -> None:
        """Called when the gradients of a step are complete and clipped; may change them."""

    def after_update(self, clipped: float) -> None:
        """Called after the optimizer's step; clipping divided the gradients by `clipped`."""

    def probe_tokens(self, *, is_first: bool) -> int:  # noqa: ARG002
        """Return how many tokens `probe` needs of a new regime; 0: no probe. `is_first`: it is the first of all."""
        return 0

    def probe(self, examples: Sequence[Example], number: int) -> Probe:
        """Learn from the first records of a new regime what `open` needs, without changing the model."""
        raise NotImplementedError

    def leave(self, slot: int, probed: Sequence[Example] = ()) -> None:
        """Called at the end of a segment of the regime in `slot`; `probed`: what it was probed with, if it is new."""

    def open(self, slot: int, *, start: int | None = None) -> None:
        """Give `slot` to a new regime, the last one probed; `start`: slot of the regime it was split from, if any."""

    def enter(self, slot: int) -> None:
        """Called at the start of a segment of the regime in `slot`, and after `load_state` if one is under way."""

    def release(self, slot: int) -> None:
        """Called when the answers of the regime in `slot` changed: what it learned before is outdated."""

    def drop(self, slot: int) -> None:
        """Forget the regime in `slot`."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a snapshot, not copied."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; `enter` follows if a segment is under way. Other tensors are ignored."""


Compute = Callable[["Learner", Sequence[Example], Sequence[int] | None, int, Callable[[int], None]], PassTotals]
"""Computes the gradients of a batch, with the arguments of `Learner.gradients`, which is the default."""


class Learner:
    """Model and optimizer. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        *,
        router_lr: float = 1.0,
        cache: AdapterCache | None = None,
        compute: Compute | None = None,
    ) -> None:
        """`router_lr`: learning rate of the routers, as a fraction of that of the experts."""
        self.model = model
        """The PEFT model, for operations on the adapter."""
        self.forward = model.get_base_model()
        """The same backbone and adapter without the PEFT wrapper, for forward passes."""
        if settings.activation_checkpointing:
            checkpoint_layers(self.forward, model.base_model.context_holder)
        self.cache = AdapterCache() if cache is None else cache
        """Weights and moments of each adapter. By default all stay in memory."""
        self._banks = {name: banks(model, name) for name in sorted(model.peft_config)}
        """By adapter; a resumed run has the same order."""
        self.active_banks: Sequence[Bank] = self.banks
        """Banks that the gradients of the newest step could reach."""
        self.active_adapters: Sequence[str] = list(self._banks)
        """Their names."""
        self.per_regime: bool = next(iter(model.peft_config.values())).per_regime
        """Whether each regime has its own adapter."""
        self.device = device
        self.hooks = Hooks()
        """Additions of the preset to a step; replaced before the first one."""
        self.usage = ExpertUsage()
        self.number = 0
        self.updates = 0
        assert settings.lr is not None, "set from the adapter's default at start-up"
        self.lr: float = settings.lr
        """Learning rate after the warm-up."""
        self._settings = settings
        self._max_grad_norm = math.inf if settings.max_grad_norm is None else settings.max_grad_norm
        self._clock = clock
        self._router_lr = router_lr
        self._groups = {name: self._new_groups(name) for name in self._banks}
        """The optimizer's groups, by adapter."""
        for name, groups in self._groups.items():
            self.cache.add(name, groups)
        model.base_model.context_holder.before_pass = self._use_adapters if self.per_regime else None
        self._changes = 0
        self.revisions: dict[str, int] = dict.fromkeys(self._groups, 0)
        """By adapter: changes with each change of its weights or moments; valid in this process only."""
        self.optimizer = MaskedAdamW(chain.from_iterable(self._groups.values()), settings)
        self._compute = Learner.gradients if compute is None else compute

    @property
    def banks(self) -> tuple[Bank, ...]:
        """All banks, by adapter, in the order of the backbone's modules."""
        return tuple(chain.from_iterable(self._banks.values()))

    @property
    def routes_by_regime(self) -> bool:
        """Whether the experts that compute a record depend on its regime."""
        return self.per_regime or any(bank.bias_HKN is not None for bank in self.banks)

    @torch.no_grad()
    def add_regime(self, slot: int, seed: int, *, start: int | None = None) -> None:
        """Give the regime in `slot` its own untrained adapter, where `per_regime`; one in that slot is replaced.

        Args:
            slot: The regime's slot.
            seed: Seed of its weights.
            start: Slot of another regime, whose weights are copied instead.
        """
        name = regime_adapter(slot)
        sources = [] if start is None else [regime_adapter(start)]
        with self.cache.keeping(sources):
            self.cache.remove(name)
            add_regime(self.model, slot, seed)
            self._banks = dict(sorted({**self._banks, name: banks(self.model, name)}.items()))
            self._set_groups({**self._groups, name: self._new_groups(name)})
            self._changed([name])
            self.cache.add(name, self._groups[name])
            for source in sources:
                pairs = zip(parameters_of(self._groups[name]), parameters_of(self._groups[source]), strict=True)
                for parameter, other in pairs:
                    parameter.copy_(other)

    def keep_regimes(self, slots: Collection[int]) -> None:
        """Delete the adapters of all other regimes, with their optimizer state; one in `slots` must exist."""
        names = {regime_adapter(slot) for slot in slots}
        gone = sorted(self.model.peft_config.keys() - names)
        for name in gone:
            delete_adapter(self.model, name)
            self.cache.remove(name)
        self._banks = {name: own for name, own in self._banks.items() if name in names}
        self._set_groups({name: groups for name, groups in self._groups.items() if name in names})

    def remove_regime(self, slot: int) -> None:
        """Delete the adapter of the regime in `slot`, with its optimizer state.

        A model has at least one adapter. Without a regime it is an untrained one in slot 0, as in a new run.
        """
        others = [slot_of(name) for name in self._groups if name != regime_adapter(slot)]
        if not others:
            self.add_regime(0, seed=0)  # replaced when a regime takes the slot
        self.keep_regimes(others or [0])

    def step(
        self,
        examples: Sequence[Example],
        slots: Sequence[int] | None = None,
        *,
        parts: int = 1,
        on_record: Callable[[int], None] = lambda _: None,
        penalty: Callable[[], Tensor] | None = None,
        rehearsed: Sequence[Rehearsal] = (),
    ) -> Step:
        """Test, guard and train on one batch.

        Args:
            examples: The batch, at least one example.
            slots: Regime slot of each example; None without regimes.
            parts: Number of forward passes to split the batch into; doubled when memory runs out.
            on_record: Called before each part with the index of its first example; rehearsed ones follow the batch.
            penalty: Computes an additional term of the objective, a scalar; its gradient is added, `Step.loss` excludes
                it.
            rehearsed: Of each update; empty without rehearsal.

        Raises:
            RuntimeError or MemoryError: a pass failed (out of memory: after the last retry), or a regime has no
                adapter; only `number`, and what earlier updates of the step changed, has changed.
        """
        started = self._clock()
        self.number += 1
        adapters = self.activate(slots)

        def update(rehearsal: Rehearsal) -> Step:
            return self._update(examples, slots, rehearsal, parts, on_record, penalty)

        with self.cache.keeping(adapters):
            rehearsed = rehearsed or [Rehearsal()] * self._settings.updates_per_batch
            first = last = update(rehearsed[0])
            for rehearsal in rehearsed[1:]:
                if last.refusal is None:
                    last = update(rehearsal)
        ended = None if last is first else last.refusal
        return replace(first, seconds=self._clock() - started, ended=ended)

    def _update(
        self,
        examples: Sequence[Example],
        slots: Sequence[int] | None,
        rehearsal: Rehearsal,
        parts: int,
        on_record: Callable[[int], None],
        penalty: Callable[[], Tensor] | None,
    ) -> Step:
        """Make one update of the active adapters, or none where loss or gradient is not finite; arguments of `step`.

        Where it is not with rehearsed records, it is made without them: a batch is refused for its own records only.
        """
        every = [*examples, *rehearsal.examples]
        every_slot = None if slots is None else [*slots, *rehearsal.slots]

        def work(parts: int) -> PassTotals:
            totals = self._compute(self, every, every_slot, parts, on_record)
            if penalty is not None:
                torch.autograd.backward(penalty())
            return totals

        # 1.
        totals = with_oom_retry(work, parts, len(every), self.optimizer.zero_grad, self.device)
        loss, norm, losses, right = totals.read(self._clip())
        # 2.
        refusal = None
        if not math.isfinite(loss):
            refusal, norm = f"loss is {loss}", math.nan
        elif not math.isfinite(norm):
            refusal = f"gradient norm is {norm}"
        # 3.
        if refusal is None:
            self._changed(self.active_adapters)
            self.updates += 1
            self.hooks.before_update()
            self.optimizer.step(self.learning_rate)
            self.hooks.after_update(clipped=max(1.0, norm / self._max_grad_norm))
            self.usage.add(self.active_banks, every_slot)
        self.optimizer.zero_grad()
        learned = [example.num_learned for example in examples]
        if rehearsal.examples:
            if refusal is not None:
                return self._update(examples, slots, Rehearsal(), parts, on_record, penalty)
            losses, right = losses[: len(examples)], right[: len(examples)]
            loss = sum(mean * number for mean, number in zip(losses, learned, strict=True)) / sum(learned)
        return Step(
            number=self.number,
            loss=loss,
            record_losses=tuple(losses),
            record_correct=tuple(right),
            tokens=sum(map(len, examples)),
            learned_tokens=sum(learned),
            grad_norm=norm,
            refusal=refusal,
        )

    def activate(self, slots: Sequence[int] | None) -> list[str]:
        """Choose the adapters that the gradients of a batch can reach, and return their names; `slots` as in `step`."""
        self.active_adapters = adapters = self._adapters_of(slots)
        self.optimizer.active = [group for name in adapters for group in self._groups[name]]
        self.active_banks = [bank for name in adapters for bank in self._banks[name]]
        return adapters

    def gradients(
        self,
        examples: Sequence[Example],
        slots: Sequence[int] | None,
        parts: int,
        on_record: Callable[[int], None],
        *,
        learned: int | None = None,
    ) -> PassTotals:
        """Run forward and backward (`memory`, eq. 1) and leave the gradients in the parameters.

        Args:
            examples: A batch, or a share of one.
            slots: As in `step`, which selected the active adapters.
            parts: As in `step`.
            on_record: As in `step`.
            learned: Learned tokens of the whole batch, if these are a share.
        """
        for bank in self.active_banks:
            bank.reset_load()
        if learned is None:
            learned = sum(example.num_learned for example in examples)
        totals = PassTotals()
        for part in slices(len(examples), parts):
            on_record(part.start)
            packed = pack(examples[part], self.device, None if slots is None else slots[part])
            auxiliary = tuple(self.hooks.auxiliary_losses(packed, examples[part]))
            with routing_context(self.model, packed.context(explore=True, hooks=auxiliary)):
                loss = packed_loss(self.forward, packed)
            weight = len(packed.target_L) / learned
            totals.add(packed, loss, weight)
            torch.autograd.backward(weight * sum((term.loss() for term in auxiliary), start=loss.mean))
        return totals

    @torch.no_grad()
    def measure(
        self,
        examples: Sequence[Example],
        slots: Sequence[int],
        *,
        parts: int = 1,
        on_record: Callable[[int], None] = lambda _: None,
    ) -> list[float]:
        """Return the loss of each example under the present weights, nats per learned token. Nothing changes.

        Arguments and errors are those of `step`.
        """

        def work(parts: int) -> list[float]:
            losses: list[float] = []
            for part in slices(len(examples), parts):
                on_record(part.start)
                packed = pack(examples[part], self.device, slots[part])
                with routing_context(self.model, packed.context()):
                    sums_B, _ = packed_loss(self.forward, packed).per_record(packed)
                losses += (sums_B / packed.learned_B).tolist()
            return losses

        return with_oom_retry(work, parts, len(examples), lambda: None, self.device)

    def score(
        self, examples: Sequence[Example], slots: Sequence[Slot] | None, *, pack_tokens: int
    ) -> Generator[None, None, list[ExampleScore]]:
        """Compute loss and accuracy of each example; yields after every forward pass."""
        return evaluate.score(self.model, examples, self.device, pack_tokens=pack_tokens, slots=slots)

    def skip_step(self) -> None:
        """Count a batch without trained records, so that its snapshot gets its own number."""
        self.number += 1

    def pin(self) -> PinnedWeights:
        """Keep the present weights and CP biases for a job that spans several training steps."""
        return self.cache.pin([bank.bias_HKN for bank in self._banks.get(SHARED, ()) if bank.bias_HKN is not None])

    def _use_adapters(self, context: RoutingContext) -> None:
        """Load the adapters of a pass before it begins."""
        sequences = context.sequences
        if sequences is None or sequences.slots is None:
            names = self.model.active_adapters
        else:
            names = list(map(regime_adapter, sequences.adapted_slots))
        self.cache.use(names)

    def _clip(self) -> Tensor:
        """Clip the gradients and return their norm, a scalar."""
        return clip_grad_norm_(parameters_of(self.optimizer.active), self._max_grad_norm)

    def _adapters_of(self, slots: Sequence[int] | None) -> list[str]:
        """Return the adapters that the gradients of a batch can reach, in an order that a resumed run repeats."""
        if not self.per_regime or slots is None:
            return list(self._groups)
        adapters = {regime_adapter(slot) for slot in slots if slot != NO_REGIME}
        if missing := adapters - self._groups.keys():
            raise RuntimeError(f"records of regimes that were never entered: there is no adapter {sorted(missing)}")
        return sorted(adapters)

    def _new_groups(self, adapter: str) -> list[Group]:
        """Return a group for the experts of each bank, and one for each router, which is updated in every step."""
        own = self._banks[adapter]
        routers = [
            Group(f"{bank.name}.router", {"weight": bank.router}, None, lr_scale=self._router_lr)
            for bank in own
            if bank.router is not None
        ]
        return [*(Group(bank.name, {"A": bank.A, "B": bank.B}, bank.load_HK) for bank in own), *routers]

    def _set_groups(self, groups: Mapping[str, list[Group]]) -> None:
        self._groups = dict(sorted(groups.items()))
        self.optimizer.groups = self.optimizer.active = list(chain.from_iterable(self._groups.values()))
        self.revisions = {name: self.revisions.get(name, 0) for name in self._groups}

    def _changed(self, adapters: Collection[str]) -> None:
        """Prepare for a change of the weights or moments of these adapters."""
        self.cache.changed(adapters)
        for name in adapters:
            self._changes += 1
            self.revisions[name] = self._changes

    @property
    def learning_rate(self) -> float:
        """The rate of the newest update, after the warm-up and before the decay by each expert's own updates."""
        warmup = self._settings.warmup_steps
        return self.lr * min(1.0, self.updates / warmup if warmup else 1.0)

    def weights(self, adapter: str) -> dict[str, Tensor]:
        """Return the weights of an adapter by their names in a PEFT folder; do not change them."""
        stored = self.cache.tensors(adapter)
        return {
            f"base_model.model.{bank.linear}.head_lora_{part}": stored[f"{bank.name}.{key}"]
            for bank in self._banks[adapter]
            for part, key in (("A", "A"), ("B", "B"), ("router", "router.weight"))
            if f"{bank.name}.{key}" in stored
        }

    def moments(self, adapter: str) -> dict[str, Tensor]:
        """Return the optimizer state of one regime's adapter, for a snapshot; do not change it."""
        stored, live = self.cache.tensors(adapter), state_dict(self._groups[adapter])
        return {f"optimizer.{name}": stored.get(name, tensor) for name, tensor in live.items()}

    def state(self) -> dict[str, Tensor]:
        """Return the remaining state of the next step, besides the adapters' weights, for a snapshot; not copied."""
        parts = {
            "optimizer": state_dict(self._groups.get(SHARED, ())),
            "bias": {bank.name: bank.bias_HKN for bank in self.banks if bank.bias_HKN is not None},
        }
        tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        return {**tensors, **self.hooks.state(), "learner.counts": torch.tensor([self.number, self.updates])}

    @torch.no_grad()
    def load_weights(self, adapter: str, weights: Mapping[str, Tensor]) -> None:
        """Replace, in place, what `weights` returned."""
        with self.cache.keeping([adapter]):
            self._changed([adapter])
            own = self.weights(adapter)
            assert own.keys() == weights.keys(), "the snapshot's manifest was checked against this adapter before"
            for name, tensor in own.items():
                tensor.copy_(weights[name])

    @torch.no_grad()
    def load_adapter(self, adapter: str, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Restore, in place, what `weights` and, where `per_regime`, `moments` returned."""
        with self.cache.keeping([adapter]):
            self.load_weights(adapter, weights)
            if self.per_regime:
                load_state_dict(self._groups[adapter], _part(moments, "optimizer."))

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, in place."""
        self.number, self.updates = (int(count) for count in tensors["learner.counts"])
        load_state_dict(self._groups.get(SHARED, ()), _part(tensors, "optimizer."))
        self.hooks.load_state(tensors)
        for bank in self.banks:
            if bank.bias_HKN is not None:
                copy_slots(bank.bias_HKN, tensors[f"bias.{bank.name}"])


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
