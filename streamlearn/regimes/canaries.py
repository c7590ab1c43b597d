"""Canaries: records from outside the stream that show harm to what the stream does not contain.

They are never trained on. A file has one record per line, in the form of the topic's records, with an optional key
`slice`; without it, the slice is the file's name up to the first dot.

    h_i = l_i(regime) - l_i(backbone),   l: mean loss of record i over its learned tokens, nats             (1)

The harm to a slice is the mean of h_i over its records. Scoring changes nothing that training depends on.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from connectors.jsonl import LineReader
from streamlearn.adapters.context import NO_REGIME, ParallelAdapter, Slot
from streamlearn.errors import ConfigError, RecordError, SourceError
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner
from streamlearn.settings import StreamSettings
from streamlearn.status import SliceScore
from streamlearn.stream.decode import Decoder
from streamlearn.stream.parse import json_type, parse
from streamlearn.stream.record import Example

MAX_CANARIES = 1024
"""In all files: a regime's are scored at once, between two steps."""
MAX_SLICE_CHARS = 64
MAX_NAMED = 5
"""Records of a slice that are named."""
MAX_LOSS = 1e3
"""Nats per token; stands for a loss that is not finite."""

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


def canary_losses(
    learner: Learner,
    canaries: Sequence[Canary],
    slot: Slot,
    *,
    pack_tokens: int,
    parallel_adapter: ParallelAdapter | None = None,
) -> CanaryLosses:
    """Score canaries under the regime in `slot`, or under the backbone with `parallel_adapter` for `NO_REGIME`."""
    work = score(
        learner.model,
        [canary.example for canary in canaries],
        learner.device,
        pack_tokens=pack_tokens,
        slots=[slot] * len(canaries),
        parallel_adapter=parallel_adapter,
    )
    return {canary.id: mean_loss(row) for canary, row in zip(canaries, run_to_end(work), strict=True)}


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


class CanaryScores:
    """Scores regimes on the canaries under the present weights, and the backbone once."""

    def __init__(self, learner: Learner, canaries: Sequence[Canary], *, pack_tokens: int) -> None:
        self.canaries = tuple(canaries)
        self._learner = learner
        self._pack_tokens = pack_tokens
        self._backbone: CanaryLosses | None = None

    def measure(self, slot: Slot, *, parallel_adapter: ParallelAdapter | None = None) -> tuple[SliceScore, ...]:
        """Score the regime in `slot`, or the backbone with `parallel_adapter`."""
        if self._backbone is None:
            self._backbone = canary_losses(self._learner, self.canaries, NO_REGIME, pack_tokens=self._pack_tokens)
        regime = canary_losses(
            self._learner, self.canaries, slot, pack_tokens=self._pack_tokens, parallel_adapter=parallel_adapter
        )
        return slice_scores(self.canaries, regime, self._backbone)
