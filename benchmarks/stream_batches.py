"""The stream of a configuration as batches, without a daemon."""

from collections.abc import Iterator

from streamlearn.daemon.build import Components
from streamlearn.stream.record import Batch


def stream_batches(components: Components) -> Iterator[Batch]:
    """Yield every batch of a stream that ends."""
    while (
        batch := components.checkpoint.intake.next_batch(timeout_s=0.0)
    ) is not None or not components.source.exhausted:
        if batch is not None:
            yield batch
    yield from components.checkpoint.intake.flush()
