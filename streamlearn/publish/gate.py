"""Whether a regime's new version may be published: paired tests on its hold-out records.

    d_i = l_i(new) - l_i(other),   l: mean loss of record i over its learned tokens, nats                  (1)
    p   = share of all signs s in {-1, 1}^n for which mean_i s_i d_i >= mean_i d_i                         (2)

If the new version is no worse, the d_i are symmetric around 0 or lower, and p falls below the level with at most its
probability (Fisher's randomization test, one-sided; 9,999 random signs where n is large). The other is the untouched
backbone and, if there is one, the published version.

Records that came after the published version may be bad, and a version that learned them would look better on them.
So it is also compared on the records that the published version was tested on. Where too few of them are left, the
sample was replaced, which happens when the regime's answers changed: then nothing can show that the new version is no
worse, and an operator decides.

Canaries show harm to what the stream does not contain. Each of their S slices has a test against the backbone, with the
accepted harm subtracted from eq. (1), at level / S (Bonferroni): together they hold a version back that has no more
harm with at most probability `level`.

`ScoringQueue` has the losses computed by the thread that owns the model. `RegimeGate` applies the tests to every regime
of a snapshot, and remembers what cannot change.
"""

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.stats import permutation_test

from streamlearn.adapters.context import NO_REGIME
from streamlearn.backbone.lora import PlainLora
from streamlearn.errors import ConfigError, StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.export.lora import PlainLoraAdapter
from streamlearn.learner.evaluate import ExampleScore, score
from streamlearn.learner.learner import Learner
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.publication import Version
from streamlearn.publish.snapshot import RegimeOfSnapshot, SnapshotRegimes
from streamlearn.regimes.canaries import Canary, by_slice, mean_loss, slice_scores
from streamlearn.regimes.holdout import TimeBudget
from streamlearn.status import RegimePublication, SliceScore
from streamlearn.stream.record import Example

BACKBONE = ""
"""Stands for the untouched backbone among the hashes of weights."""
MAX_KNOWN = 65_536
"""Maximum number of losses that are remembered of the backbone, some 10 MB."""
RANDOM_SIGNS = 9_999
"""Signs that are drawn where 2^n is more."""

_log = get_logger("publish")


class HeldBack(StrEnum):
    """Why a version is not published."""

    TOO_FEW_RECORDS = "too_few_records"
    """The regime has fewer hold-out records than `publish.min_holdout_records`."""
    WORSE_THAN_BACKBONE = "worse_than_backbone"
    WORSE_THAN_PUBLISHED = "worse_than_published"
    WORSE_ON_CANARY = "worse_on_canary"
    """On a slice of the canaries, worse than the backbone by more than `publish.max_canary_harm`."""
    ANSWERS_CHANGED = "answers_changed"
    """The answers changed, or may have: also where a regime began as the refused return of another. Or the regime was
    split. An operator decides."""
    NOT_LOADED = "not_loaded"
    """No replica could load it, or the object store does not get it."""


@dataclass(frozen=True)
class Comparison:
    """A new version compared with another, on the same records."""

    records: int
    loss: float
    """Of the new version, mean over the records, nats per token."""
    other_loss: float
    p_value: float
    """Eq. (2)."""


@dataclass(frozen=True)
class GateDecision:
    """Result of the tests."""

    held_back: HeldBack | None
    """None: the version may be published."""
    backbone: Comparison | None = None
    published: Comparison | None = None
    """On all records, or on those of the published version if it is worse there; None without a published version."""
    canaries: tuple[SliceScore, ...] = ()
    """One per slice; empty unless the version passed the other tests."""


Losses = Mapping[str, float]
"""Mean loss of each record, nats per token, by the record's digest."""


@dataclass(frozen=True)
class Gate:
    """The tests at one level."""

    level: float
    min_records: int
    max_canary_harm: float = 0.0

    def unscored(self, records: Collection[str], tested_on: Collection[str] | None) -> HeldBack | None:
        """Return the reason that holds a version back whatever its losses are.

        Args:
            records: Digests of the regime's hold-out records.
            tested_on: Digests of the records that the published version was tested on; None if there is none to compare
                with.
        """
        if tested_on is not None and len(set(tested_on) & set(records)) < self.min_records:
            return HeldBack.ANSWERS_CHANGED
        return HeldBack.TOO_FEW_RECORDS if len(records) < self.min_records else None

    def decide(
        self, new: Losses, backbone: Losses, published: Losses | None = None, tested_on: Collection[str] = ()
    ) -> GateDecision:
        """Decide about a version that `unscored` does not hold back.

        Args:
            new: Losses of the version on the regime's hold-out records.
            backbone: Losses of the untouched backbone.
            published: Losses of the published version; None if there is none to compare with.
            tested_on: Digests of the records that the published version was tested on.
        """
        with_backbone = compare(new, backbone)
        if with_backbone.p_value <= self.level:
            return GateDecision(HeldBack.WORSE_THAN_BACKBONE, with_backbone)
        if published is None:
            return GateDecision(None, with_backbone)
        with_published = compare(new, published)
        earlier = {digest: loss for digest, loss in new.items() if digest in tested_on}
        for comparison in (compare(earlier, published), with_published):
            if comparison.p_value <= self.level:
                return GateDecision(HeldBack.WORSE_THAN_PUBLISHED, with_backbone, comparison)
        return GateDecision(None, with_backbone, with_published)

    def check_canaries(self, canaries: Sequence[Canary]) -> None:
        """Check that each slice has enough records for its test to fail.

        Raises:
            ConfigError: one has too few.
        """
        slices = by_slice(canaries)
        for name, ids in slices.items():
            if max(0.5 ** len(ids), 1 / (RANDOM_SIGNS + 1)) > self.level / len(slices):
                raise ConfigError(
                    f"holdout.canaries: {len(ids)} records of slice {name} cannot show harm at publish.level "
                    f"{self.level:g} / {len(slices)} slices, expected {_required(self.level / len(slices))}; add "
                    "records, or join slices"
                )

    def test_canaries(self, canaries: Sequence[Canary], new: Losses, backbone: Losses) -> tuple[SliceScore, ...]:
        """Test each slice; losses are by the canaries' ids."""
        ids = by_slice(canaries)
        rows = []
        for row in slice_scores(canaries, new, backbone):
            accepted = {id_: backbone[id_] + self.max_canary_harm for id_ in ids[row.slice]}
            test = compare({id_: new[id_] for id_ in ids[row.slice]}, accepted)
            rows.append(replace(row, p_value=test.p_value))
        return tuple(rows)

    def harmed(self, slices: Sequence[SliceScore]) -> list[SliceScore]:
        """Return the slices on which the version is worse."""
        level = self.level / max(len(slices), 1)
        return [row for row in slices if row.p_value is not None and row.p_value <= level]


def _required(level: float) -> str:
    """Number of records whose test can fail at a level.

    >>> _required(0.05), _required(1e-5)
    ('at least 5', 'fewer slices')
    """
    return "fewer slices" if level * (RANDOM_SIGNS + 1) < 1 else f"at least {math.ceil(-math.log2(level))}"


def compare(new: Losses, other: Losses) -> Comparison:
    """Compare on the records of `new`, all of which `other` has.

    >>> compare({"a": 2.0, "b": 3.0}, {"a": 1.0, "b": 1.0})
    Comparison(records=2, loss=2.5, other_loss=1.0, p_value=0.25)
    """
    new_N = np.array(list(new.values()))
    other_N = np.array([other[digest] for digest in new])
    test = permutation_test(
        (new_N, other_N),
        _mean_difference,
        permutation_type="samples",
        alternative="greater",
        n_resamples=RANDOM_SIGNS,
        vectorized=True,
        rng=np.random.default_rng(0),  # the decision must not depend on when it is made
    )
    return Comparison(len(new), float(new_N.mean()), float(other_N.mean()), float(test.pvalue))


def _mean_difference(new: NDArray[np.float64], other: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Mean of eq. (1)."""
    mean: NDArray[np.float64] = (new - other).mean(axis=axis)
    return mean


class PublishingStoppedError(StreamlearnError):
    """The daemon is stopping; what was not published is tested again after the next start."""


@dataclass(frozen=True)
class _Request:
    examples: Sequence[Example]
    lora: PlainLora | None
    future: Future[list[ExampleScore]] = field(default_factory=Future)


class ScoringQueue:
    """Hold-out records scored by the thread that owns the model, for the thread that publishes.

    1. The publisher: `score(examples, lora)` waits for the scores.
    2. The loop, between steps: `serve()` makes forward passes while the time budget allows.
    3. The loop, at its end: `close()`; a waiting publisher gets PublishingStoppedError.
    """

    def __init__(self, learner: Learner, budget: TimeBudget, *, pack_tokens: int) -> None:
        self._learner = learner
        self.budget = budget
        self._pack_tokens = pack_tokens
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._running: tuple[_Request, Generator[None, None, list[ExampleScore]]] | None = None
        self._closed = threading.Event()

    def score(self, examples: Sequence[Example], lora: PlainLora | None) -> list[ExampleScore]:
        """Score examples under a plain LoRA, or under the untouched backbone; blocks until it is done.

        Raises:
            PublishingStoppedError: the loop ended first.
        """
        request = _Request(examples, lora)
        self._waiting.put(request)
        if self._closed.is_set():
            self._abandon()
        return request.future.result()

    def serve(self, *, idle: bool) -> bool:
        """Make one forward pass if there is a request and the budget allows, or always if `idle`.

        Returns whether there was one.
        """
        if not (idle or self.budget.affordable):
            return False
        running = self._running or self._next()
        if running is None:
            return False
        request, work = running
        self._running = running
        try:
            with self.budget.spending(idle=idle):
                next(work)
        except StopIteration as finished:
            self._running = None
            request.future.set_result(finished.value)
        except Exception as error:  # noqa: BLE001 - a version that cannot be scored must not end the training run
            self._running = None
            request.future.set_exception(error)
        return True

    def close(self) -> None:
        """End every wait. Safe to call twice."""
        self._closed.set()
        if self._running is not None:
            self._fail(self._running[0])
            self._running = None
        self._abandon()

    def _next(self) -> tuple[_Request, Generator[None, None, list[ExampleScore]]] | None:
        try:
            request = self._waiting.get_nowait()
        except queue.Empty:
            return None
        work = score(
            self._learner.model,
            request.examples,
            self._learner.device,
            pack_tokens=self._pack_tokens,
            slots=[NO_REGIME] * len(request.examples),
            parallel_adapter=None if request.lora is None else PlainLoraAdapter(request.lora),
        )
        return request, work

    def _abandon(self) -> None:
        while True:
            try:
                self._fail(self._waiting.get_nowait())
            except queue.Empty:
                return

    @staticmethod
    def _fail(request: _Request) -> None:
        request.future.set_exception(PublishingStoppedError("the daemon is stopping"))


@dataclass(frozen=True)
class Candidate:
    """A regime's newest weights, which passed the gate."""

    regime: RegimeOfSnapshot
    lora: PlainLora
    losses: Losses
    """Of the hold-out records, by digest."""
    backbone: Comparison
    canaries: tuple[SliceScore, ...] = ()


@dataclass(frozen=True)
class RegimeDecision:
    """The gate's decision on one regime."""

    regime: RegimeOfSnapshot
    version: Version | None
    """The published version, which stays where there is no candidate."""
    candidate: Candidate | None
    status: RegimePublication


class RegimeGate:
    """Decides about the regimes of snapshots; remembers the losses of versions and of the backbone."""

    def __init__(
        self, gate: Gate, scoring: ScoringQueue, folder: PublicationFiles, canaries: Sequence[Canary] = ()
    ) -> None:
        self._gate = gate
        self._canaries = tuple(canaries)
        self._scoring = scoring
        self._folder = folder
        self._losses: dict[str, dict[str, float]] = {}
        """Loss of each record, by digest or canary's id, by hash of the weights or `BACKBONE`."""
        self._decisions: dict[int, tuple[str, RegimePublication]] = {}
        """The last decision on each regime, and the weights that it is about."""
        self.num_held_back: Counter[str] = Counter()
        """Versions held back, by reason; weights that stay held back for the same reason count once."""

    def decide(self, snapshot: SnapshotRegimes, published: Mapping[int, Version]) -> list[RegimeDecision]:
        """Decide about every regime of a snapshot.

        Args:
            snapshot: The snapshot.
            published: Versions that are published, by number of the regime.
        """
        regimes = snapshot.regimes
        decisions = [self._decide(snapshot, regime, published.get(regime.number)) for regime in regimes]
        known = [regime.weights_sha256 for regime in regimes]
        self._forget([*known, *(version.weights_sha256 for version in published.values())])
        return decisions

    def _decide(self, snapshot: SnapshotRegimes, regime: RegimeOfSnapshot, version: Version | None) -> RegimeDecision:
        name = None if version is None else version.name
        if version is not None and version.weights_sha256 == regime.weights_sha256:
            weights, status = self._decisions.get(regime.number, ("", None))
            if status is None or weights != regime.weights_sha256:  # measured on other weights
                status = RegimePublication(regime.number, name)
            kept = replace(status, version=name, held_back=None)
            return RegimeDecision(regime, version, None, kept)
        examples = snapshot.holdouts(regime.slot)
        approved = regime.approved_at is not None and (version is None or regime.approved_at > version.step)
        compared = None if approved else version
        tested_on = None if compared is None else compared.holdout
        unscored = self._gate.unscored(examples.keys(), tested_on)
        is_doubtful = regime.is_suspected or (version is None and regime.refused_return is not None)
        if is_doubtful and not approved:
            unscored = HeldBack.ANSWERS_CHANGED
        if unscored is not None:
            return self._held_back(snapshot, regime, version, GateDecision(unscored))
        lora = snapshot.lora(regime.slot)
        losses = self._losses_of(regime.weights_sha256, examples, lambda: lora)
        decision = self._gate.decide(
            losses,
            self._losses_of(BACKBONE, examples, lambda: None),
            None
            if compared is None
            else self._losses_of(compared.weights_sha256, examples, lambda: self._folder.lora(compared.name)),
            tested_on or (),
        )
        if decision.held_back is None:
            decision = self._with_canaries(decision, regime.weights_sha256, lora)
        if decision.held_back is not None:
            return self._held_back(snapshot, regime, version, decision)
        assert decision.backbone is not None
        status = _regime_status(regime, name, snapshot.step, decision)
        self._decisions[regime.number] = (regime.weights_sha256, status)
        candidate = Candidate(regime, lora, losses, decision.backbone, decision.canaries)
        return RegimeDecision(regime, version, candidate, status)

    def _with_canaries(self, decision: GateDecision, weights: str, lora: PlainLora) -> GateDecision:
        """Add the canaries' tests to those that a version passed."""
        if not self._canaries:
            return decision
        examples = {canary.id: canary.example for canary in self._canaries}
        slices = self._gate.test_canaries(
            self._canaries,
            self._losses_of(weights, examples, lambda: lora),
            self._losses_of(BACKBONE, examples, lambda: None),
        )
        held_back = HeldBack.WORSE_ON_CANARY if self._gate.harmed(slices) else None
        return replace(decision, held_back=held_back, canaries=slices)

    def _held_back(
        self, snapshot: SnapshotRegimes, regime: RegimeOfSnapshot, version: Version | None, decision: GateDecision
    ) -> RegimeDecision:
        status = _regime_status(regime, None if version is None else version.name, snapshot.step, decision)
        before = self._decisions.get(regime.number)
        if before is None or before[0] != regime.weights_sha256 or before[1].held_back != status.held_back:
            self.num_held_back[str(status.held_back)] += 1
            _log.warning(
                Event.VERSION_HELD_BACK,
                regime=regime.number,
                reason=status.held_back,
                step=snapshot.step,
                published=status.version,
                records=status.records,
                loss=status.loss,
                published_loss=status.published_loss,
                backbone_loss=status.backbone_loss,
                p_value=status.p_value,
                canaries={row.slice: row.worst for row in self._gate.harmed(decision.canaries)},
                harm={row.slice: round(row.loss - row.backbone_loss, 4) for row in decision.canaries},
            )
        self._decisions[regime.number] = (regime.weights_sha256, status)
        return RegimeDecision(regime, version, None, status)

    def _losses_of(self, weights: str, examples: Mapping[str, Example], load: Callable[[], PlainLora | None]) -> Losses:
        """Losses of these records; unknown ones are scored."""
        known = self._losses.setdefault(weights, {})
        missing = {digest: example for digest, example in examples.items() if digest not in known}
        if missing:
            scores = self._scoring.score(list(missing.values()), load())
            known |= {digest: mean_loss(row) for digest, row in zip(missing, scores, strict=True)}
        return {digest: known[digest] for digest in examples}

    def _forget(self, weights: Collection[str]) -> None:
        """Drop the losses of all other weights, and those of the backbone if they are too many."""
        if len(self._losses.get(BACKBONE, ())) > MAX_KNOWN:
            del self._losses[BACKBONE]
        self._losses = {key: losses for key, losses in self._losses.items() if key == BACKBONE or key in weights}


def _regime_status(
    regime: RegimeOfSnapshot, version: str | None, step: int, decision: GateDecision
) -> RegimePublication:
    compared = [comparison for comparison in (decision.published, decision.backbone) if comparison is not None]
    decisive = compared[0] if compared else None
    return RegimePublication(
        number=regime.number,
        version=version,
        held_back=None if decision.held_back is None else str(decision.held_back),
        step=step,
        records=None if decisive is None else decisive.records,
        loss=None if decisive is None else decisive.loss,
        published_loss=None if decision.published is None else decision.published.other_loss,
        backbone_loss=None if decision.backbone is None else decision.backbone.other_loss,
        p_value=min((comparison.p_value for comparison in compared), default=None),
        canaries=decision.canaries,
    )
