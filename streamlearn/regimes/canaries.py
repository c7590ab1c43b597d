"""Canaries: records from outside the stream that show harm to what the stream does not contain.

They are never trained on. A file has one record per line, in the form of the topic's records, with an optional key
`slice`; without it, the slice is the file's name up to the first dot.

    h_i = l_i(regime) - l_i(backbone),   l: mean loss of record i over its learned tokens, nats             (1)

The harm to a slice is the mean of h_i over its records. Scoring changes nothing that training depends on.
"""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

from connectors.jsonl import LineReader
from streamlearn.adapters.context import NO_REGIME, ParallelAdapter, Slot
from streamlearn.errors import AdapterGoneError, ConfigError, RecordError, SourceError
from streamlearn.events import Event, get_logger
from streamlearn.learner.cache import PinnedWeights
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.regimes.regime import Regime
from streamlearn.settings import StreamSettings
from streamlearn.status import SliceScore
from streamlearn.stream.decode import Decoder
from streamlearn.stream.parse import json_type, parse
from streamlearn.stream.record import Example

MAX_CANARIES = 1024
"""In all files: their examples stay in memory, and every version is scored on each."""
MAX_SLICE_CHARS = 64
MAX_NAMED = 5
"""Records of a slice that are named."""
MAX_LOSS = 1e3
"""Nats per token; stands for a loss that is not finite."""

_log = get_logger("shift")

CanaryLosses = Mapping[str, float]
"""Mean loss of each canary, nats per token, by id."""


@dataclass(frozen=True)
class Canary:
    """One record."""

    id: str
    """FILE:OFFSET, the line's number from 0."""
    slice: str
    example: Example


def read_canaries(paths: Sequence[Path], decoder: Decoder, limits: StreamSettings) -> tuple[Canary, ...]:
    """Read the files of `holdout.canaries`.

    Raises:
        ConfigError: a file is missing, damaged or empty, a record cannot be used, or there are too many; names the
            record.
    """
    names = [path.name for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"holdout.canaries: files must have different names, found {name} twice; rename one")
    canaries: list[Canary] = []
    for path in paths:
        before = len(canaries)
        for offset, line in _lines(path):
            try:
                canaries.append(_canary(path, offset, line, decoder, limits))
            except RecordError as error:
                raise ConfigError(f"holdout.canaries: {path}, offset {offset}: {error}; fix the record") from error
            if len(canaries) > MAX_CANARIES:
                raise ConfigError(
                    f"holdout.canaries: expected at most {MAX_CANARIES:,} records, found more; keep a sample of them"
                )
        if len(canaries) == before:
            raise ConfigError(f"holdout.canaries: {path} must hold at least one record, found none")
    return tuple(canaries)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their offsets."""
    try:
        with closing(LineReader(path)) as reader:
            while (line := reader.next_line()) is not None:
                if line.strip():
                    yield reader.number - 1, line
    except SourceError as error:
        raise ConfigError(f"holdout.canaries: {error}") from error


def _canary(path: Path, offset: int, line: bytes, decoder: Decoder, limits: StreamSettings) -> Canary:
    value = parse(line, limits)
    name = value.pop("slice", path.name.partition(".")[0])
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_SLICE_CHARS or not name.isprintable():
        found = repr(name[: MAX_SLICE_CHARS + 1]) if isinstance(name, str) else json_type(name)
        raise ConfigError(
            f"holdout.canaries: {path}, offset {offset}: slice must be a string of 1 to {MAX_SLICE_CHARS} printable "
            f"characters, found {found}; name the slice, or leave the key out"
        )
    return Canary(f"{path.name}:{offset}", name, decoder.decode_value(value))


def by_slice(canaries: Sequence[Canary]) -> dict[str, list[str]]:
    """Ids by slice, in the order of the files."""
    slices: dict[str, list[str]] = {}
    for canary in canaries:
        slices.setdefault(canary.slice, []).append(canary.id)
    return slices


def mean_loss(row: ExampleScore) -> float:
    """Mean loss of a record, finite: one that overflowed is as bad as can be."""
    loss = row.loss_sum / row.tokens
    return min(loss, MAX_LOSS) if math.isfinite(loss) else MAX_LOSS


def slice_scores(canaries: Sequence[Canary], regime: CanaryLosses, backbone: CanaryLosses) -> tuple[SliceScore, ...]:
    """Compare a regime's losses with the backbone's, slice by slice."""
    rows = []
    for name, ids in by_slice(canaries).items():
        risen = sorted((backbone[id_] - regime[id_], number, id_) for number, id_ in enumerate(ids))
        rows.append(
            SliceScore(
                name,
                len(ids),
                fmean(regime[id_] for id_ in ids),
                fmean(backbone[id_] for id_ in ids),
                worst=tuple(id_ for fall, _, id_ in risen[:MAX_NAMED] if fall < 0),
            )
        )
    return tuple(rows)


@dataclass
class _Scoring:
    """A scoring under way, of a regime or of the backbone, with the weights of a snapshot."""

    regime: Regime | None
    step: int
    weights: PinnedWeights
    work: Generator[None, None, list[ExampleScore]]


class CanaryScores:
    """Scores regimes on the canaries with the weights of the newest snapshot, and the backbone once."""

    def __init__(self, learner: Learner, canaries: Sequence[Canary], *, pack_tokens: int) -> None:
        self.canaries = tuple(canaries)
        self._learner = learner
        self._pack_tokens = pack_tokens
        self._backbone: CanaryLosses | None = None
        self._running: _Scoring | None = None
        self._due: list[Regime] = []
        self._weights: PinnedWeights | None = None
        """Of the newest snapshot, while regimes are due."""

    def schedule(self, regimes: Iterable[Regime]) -> None:
        """Score these regimes that changed since their last scoring, with the present weights."""
        learner = self._learner
        if self.canaries:
            changed = [
                regime
                for regime in regimes
                if regime.canaries_at < (regime.scores.trained_at if learner.per_regime else learner.number)
            ]
            self._due = sorted(changed, key=lambda regime: -regime.canaries_at)
            self._step, self._weights = learner.number, learner.pin() if changed else None

    def clear(self) -> None:
        """Abandon the scoring under way: the run went back."""
        self._running = None

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def advance(self) -> bool:
        """Make one forward pass; return whether there was one to make."""
        self._running = running = self._running or self._next()
        if running is None:
            return False
        try:
            with running.weights.swapped_in():
                next(running.work)
        except StopIteration as finished:
            self._running = None
            self._finish(running, self._losses(finished.value))
        except AdapterGoneError:  # the regime was dropped
            self._running = None
        return True

    def measure(self, slot: Slot, *, parallel_adapter: ParallelAdapter | None = None) -> tuple[SliceScore, ...]:
        """Score the regime in `slot` under the present weights, or the backbone with `parallel_adapter`, at once."""
        if self._backbone is None:
            self._backbone = self._losses(run_to_end(self._score(NO_REGIME)))
        return slice_scores(
            self.canaries, self._losses(run_to_end(self._score(slot, parallel_adapter))), self._backbone
        )

    def _next(self) -> _Scoring | None:
        if not self._due or self._weights is None:
            return None
        if self._backbone is None:
            return _Scoring(None, self._step, self._weights, self._score(NO_REGIME))
        regime, weights = self._due.pop(), self._weights
        self._weights = weights if self._due else None
        return _Scoring(regime, self._step, weights, self._score(regime.slot))

    def _finish(self, scoring: _Scoring, losses: CanaryLosses) -> None:
        regime = scoring.regime
        if regime is None or self._backbone is None:
            self._backbone = losses
            return
        regime.canaries, regime.canaries_at = slice_scores(self.canaries, losses, self._backbone), scoring.step
        regime.status = None
        harm = {row.slice: round(row.loss - row.backbone_loss, 4) for row in regime.canaries}
        _log.debug(Event.CANARIES_SCORED, regime=regime.number, step=scoring.step, harm=harm)

    def _score(
        self, slot: Slot, parallel_adapter: ParallelAdapter | None = None
    ) -> Generator[None, None, list[ExampleScore]]:
        return score(
            self._learner.model,
            [canary.example for canary in self.canaries],
            self._learner.device,
            pack_tokens=self._pack_tokens,
            slots=[slot] * len(self.canaries),
            parallel_adapter=parallel_adapter,
        )

    def _losses(self, scores: Sequence[ExampleScore]) -> CanaryLosses:
        for image in chain.from_iterable(canary.example.images for canary in self.canaries):
            image.drop_inputs()
        return {canary.id: mean_loss(row) for canary, row in zip(self.canaries, scores, strict=True)}
