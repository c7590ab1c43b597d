"""The stream of a configuration as batches."""

from types import SimpleNamespace
from typing import Any

from benchmarks.stream_batches import stream_batches


def test_every_batch_of_a_stream_is_yielded() -> None:
    """A pause yields nothing; the last batches come when the source is exhausted."""
    polled: list[int | None] = [1, None, 2, None]
    source = SimpleNamespace(exhausted=False)

    def next_batch(*, timeout_s: float) -> int | None:
        assert timeout_s == 0.0
        batch = polled.pop(0)
        source.exhausted = not polled
        return batch

    intake = SimpleNamespace(next_batch=next_batch, flush=lambda: [3])
    components: Any = SimpleNamespace(checkpoint=SimpleNamespace(intake=intake), source=source)
    found: list[Any] = list(stream_batches(components))
    assert found == [1, 2, 3]
