"""The gate over one snapshot: which regimes keep their version, which get a new one, and which are held back."""

import queue
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from streamlearn.adapters.context import NO_REGIME
from streamlearn.errors import StreamlearnError
from streamlearn.events import Event, get_logger
from streamlearn.export.lora import PlainLora, PlainLoraAdapter
from streamlearn.learner.evaluate import ExampleScore, score
from streamlearn.learner.learner import Learner
from streamlearn.publish.folder import PublicationFiles
from streamlearn.publish.gate import Comparison, Gate, GateDecision, HeldBack, Losses
from streamlearn.publish.publication import Version
from streamlearn.publish.snapshot import RegimeOfSnapshot, SnapshotRegimes
from streamlearn.regimes.holdout import TimeBudget
from streamlearn.status import RegimePublication
from streamlearn.stream.record import Example

# Hold-out records scored by the thread that owns the model, for the thread that publishes.
#
# 1. The publisher: `queue.score(examples, lora)` waits for the scores.
# 2. The loop, between steps: `queue.serve()` makes forward passes while the time budget allows.
# 3. The loop, at its end: `queue.close()`; who waits gets PublishingStoppedError.


class PublishingStoppedError(StreamlearnError):
    """The daemon is stopping; what was not published is tested again after the next start."""


@dataclass(frozen=True)
class _Request:
    examples: Sequence[Example]
    lora: PlainLora | None
    future: Future[list[ExampleScore]] = field(default_factory=Future)


class ScoringQueue:
    """Requests in their order, each served in pieces. `score` may be called from any thread."""

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


_BACKBONE = ""
"""What stands for the untouched backbone among the hashes of weights."""
MAX_KNOWN = 65_536
"""Maximum number of losses that are remembered of the backbone, some 10 MB."""

_log = get_logger("publish")


@dataclass(frozen=True)
class Candidate:
    """A regime's newest weights, which passed the gate."""

    regime: RegimeOfSnapshot
    lora: PlainLora
    losses: Losses
    """Of the hold-out records, by digest."""
    backbone: Comparison


@dataclass(frozen=True)
class RegimeDecision:
    """What the gate says of one regime."""

    regime: RegimeOfSnapshot
    version: Version | None
    """The published version, which stays where there is no candidate."""
    candidate: Candidate | None
    status: RegimePublication


class RegimeGate:
    """Scores the regimes of snapshots, and remembers what cannot change: losses of versions and of the backbone."""

    def __init__(self, gate: Gate, scoring: ScoringQueue, folder: PublicationFiles) -> None:
        self._gate = gate
        self._scoring = scoring
        self._folder = folder
        self._losses: dict[str, dict[str, float]] = {}
        """Loss of each record, by digest, by hash of the weights or `_BACKBONE`."""
        self._decisions: dict[int, tuple[str, RegimePublication]] = {}
        """The last decision on each regime, and the weights that it is about."""

    def decide(self, snapshot: SnapshotRegimes, published: Mapping[int, Version]) -> list[RegimeDecision]:
        """Decide about every regime of a snapshot.

        Args:
            snapshot: The snapshot.
            published: Versions that are published, by number of the regime.
        """
        regimes = snapshot.regimes
        decisions = [self._decide(snapshot, each, published.get(each.number)) for each in regimes]
        known = [regime.weights_sha256 for regime in regimes]
        self._forget([*known, *(version.weights_sha256 for version in published.values())])
        return decisions

    def _decide(self, snapshot: SnapshotRegimes, regime: RegimeOfSnapshot, version: Version | None) -> RegimeDecision:
        name = None if version is None else version.name
        if version is not None and version.weights_sha256 == regime.weights_sha256:
            weights, status = self._decisions.get(regime.number, ("", None))
            if status is None or weights != regime.weights_sha256:  # the figures are of other weights
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
        losses = self._known(regime.weights_sha256, examples, lambda: lora)
        decision = self._gate.decide(
            losses,
            self._known(_BACKBONE, examples, lambda: None),
            None if compared is None else self._known_of(compared, examples),
            tested_on or (),
        )
        if decision.held_back is not None:
            return self._held_back(snapshot, regime, version, decision)
        assert decision.backbone is not None
        status = _status(regime, name, snapshot.step, decision)
        self._decisions[regime.number] = (regime.weights_sha256, status)
        return RegimeDecision(regime, version, Candidate(regime, lora, losses, decision.backbone), status)

    def _held_back(
        self, snapshot: SnapshotRegimes, regime: RegimeOfSnapshot, version: Version | None, decision: GateDecision
    ) -> RegimeDecision:
        status = _status(regime, None if version is None else version.name, snapshot.step, decision)
        before = self._decisions.get(regime.number)
        if before is None or before[0] != regime.weights_sha256 or before[1].held_back != status.held_back:
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
            )
        self._decisions[regime.number] = (regime.weights_sha256, status)
        return RegimeDecision(regime, version, None, status)

    def _known_of(self, version: Version, examples: Mapping[str, Example]) -> Losses:
        return self._known(version.weights_sha256, examples, lambda: self._folder.lora(version.name))

    def _known(self, weights: str, examples: Mapping[str, Example], load: Callable[[], PlainLora | None]) -> Losses:
        """Losses of these records; only those that are not known need a forward pass."""
        known = self._losses.setdefault(weights, {})
        missing = {digest: example for digest, example in examples.items() if digest not in known}
        if missing:
            scores = self._scoring.score(list(missing.values()), load())
            known |= {digest: _mean_loss(each) for digest, each in zip(missing, scores, strict=True)}
        return {digest: known[digest] for digest in examples}

    def _forget(self, weights: Collection[str]) -> None:
        """Drop the losses of all other weights, and those of the backbone if they are too many."""
        if len(self._losses.get(_BACKBONE, ())) > MAX_KNOWN:
            del self._losses[_BACKBONE]
        self._losses = {key: losses for key, losses in self._losses.items() if key == _BACKBONE or key in weights}


def _mean_loss(score: ExampleScore) -> float:
    return score.loss_sum / score.tokens


def _status(regime: RegimeOfSnapshot, version: str | None, step: int, decision: GateDecision) -> RegimePublication:
    compared = [each for each in (decision.published, decision.backbone) if each is not None]
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
        p_value=min((each.p_value for each in compared), default=None),
    )
