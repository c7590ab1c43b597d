"""A batch with the regimes of its records."""

from streamlearn.shift.monitor import AssignedBatch
from tests.shift.streams import batches, stream


def test_without_drops_records_examples_and_slots_together() -> None:
    """The remaining ones keep their order."""
    [batch] = batches(stream([0, 1, 0, 1]), (4,))
    rest, slots = AssignedBatch(batch, (5, 6, 7, 8)).without({0, 2})
    assert slots == (6, 8)
    assert rest.records == (batch.records[1], batch.records[3])
    assert rest.examples == (batch.examples[1], batch.examples[3])
