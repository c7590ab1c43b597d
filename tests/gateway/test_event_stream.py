"""What became of a stream, as it is counted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from streamlearn.gateway.upstreams import EventStream, Outcome, Upstream

DONE = b"data: [DONE]\n\n"


async def outcome_after(parts: list[bytes], num_read: int) -> Outcome:
    """The outcome of a stream of which a client reads some parts and leaves."""

    async def rest() -> AsyncIterator[bytes]:
        for part in parts[1:]:
            yield part

    stream = EventStream(Upstream("http://127.0.0.1", timeout_s=1.0), parts[0], rest(), AsyncExitStack())
    passed = stream.parts()
    for _ in range(num_read):
        await anext(passed)
    await stream.close()
    return stream.outcome


@pytest.mark.parametrize(
    ("parts", "num_read", "outcome"),
    [
        ([b"data: a\n\n", DONE], 2, "answered"),
        ([b"data: a\n\n", DONE[:7], DONE[7:]], 3, "answered"),
        ([b"data: a\n\n" + DONE], 1, "answered"),
        ([b"data: a\n\n", DONE], 1, "cancelled"),
        ([b"data: a\n\n", b"data: b\n\n", DONE], 2, "cancelled"),
        ([b"data: a\n\n", b"data: b\n\n"], 3, "broken"),
    ],
)
def test_a_client_that_leaves_at_the_end_of_the_stream_was_answered(
    parts: list[bytes], num_read: int, outcome: Outcome
) -> None:
    """As OpenAI's clients leave, which close at `[DONE]`; one that leaves earlier has cancelled it."""
    assert asyncio.run(outcome_after(parts, num_read)) == outcome
