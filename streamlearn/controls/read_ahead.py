"""How far a run had read when it wrote a snapshot.

A batch is trained on once later records were examined for shifts, so what a snapshot holds may depend on records at and
after its position. Only before the offsets here, and not merely before the position, is a record known to have had no
influence.
"""

from collections.abc import Iterable

from streamlearn.snapshot.manifest import Manifest
from streamlearn.stream.batch import Batch
from streamlearn.stream.record import Position

KEY = "read_ahead"
"""In the manifest's component `stream`."""


def read_ahead(manifest: Manifest) -> Position:
    """Per partition, the offset after the last record that had been examined; the position in snapshots of 0.1.0."""
    rows = manifest.components.get("stream", {}).get(KEY)
    return manifest.position if rows is None else Position.from_json(rows)


def advanced(before: Position, position: Position, waiting: Iterable[Batch]) -> Position:
    """The furthest of two positions and of the batches that wait to be trained on."""
    reached = dict(before)
    ends = [(run.origin, run.next_offset) for batch in waiting for run in batch.runs]
    for origin, offset in [*position.items(), *ends]:
        reached[origin] = max(offset, reached.get(origin, 0))
    return Position(reached)
