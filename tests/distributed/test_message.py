"""Messages from the leader arrive as they were sent."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.distributed.channel import Kind, RankMessage, StepRequest
from streamlearn.stream.record import IGNORED, Example, StoredExample


@st.composite
def examples(draw: st.DrawFn) -> StoredExample:
    ids = np.array(draw(st.lists(st.integers(0, 99), min_size=1, max_size=9)), dtype=np.int32)
    learned = draw(st.integers(0, len(ids) - 1))
    labels = np.where(np.arange(len(ids)) >= learned, ids, IGNORED).astype(np.int32)
    images = draw(st.lists(st.binary(max_size=5), max_size=2).map(tuple))
    return StoredExample(ids, labels, draw(st.none() | st.sampled_from(["a", "b"])), images)


def with_images(example: Example, images: Sequence[bytes]) -> Example:
    """The bytes of the images in place of the sample type."""
    return Example(example.input_ids, example.labels, b"|".join(images).hex())


@given(st.lists(examples(), min_size=1, max_size=6), st.booleans())
def test_a_step_arrives_as_it_was_sent(sent: list[StoredExample], has_slots: bool) -> None:
    """Examples of any length, with and without images and regimes."""
    slots = [3 * index - 1 for index in range(len(sent))] if has_slots else None
    request = StepRequest(7, 2, 40, sent, slots, ["regime0"], [], [0, 2])
    message = RankMessage.decode(RankMessage(Kind.STEP, step=request).encode())
    arrived = message.step
    assert arrived is not None
    assert (message.kind, arrived.number, arrived.parts, arrived.learned) == (Kind.STEP, 7, 2, 40)
    assert (list(arrived.changed), list(arrived.removed), list(arrived.biases)) == (["regime0"], [], [0, 2])
    assert (None if arrived.slots is None else list(arrived.slots)) == slots
    for stored, original in zip(arrived.examples, sent, strict=True):
        example = stored.restored(with_images)
        np.testing.assert_array_equal(example.input_ids, original.input_ids)
        np.testing.assert_array_equal(example.labels, original.labels)
        assert example.input_ids.dtype == np.int32
        assert example.sample_type == (b"|".join(original.images).hex() if original.images else original.sample_type)
