"""What is sent is what arrives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from streamlearn.distributed.share import Kind, RankMessage, from_message, to_message
from streamlearn.stream.record import IGNORED, Example

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.uint8, np.int32, np.int64, np.float32]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@given(st.sampled_from(Kind), st.dictionaries(st.text(), JSON), st.lists(ARRAYS, max_size=4))
def test_a_message_arrives_as_it_was_sent(kind: Kind, fields: dict[str, Any], sent: list[NDArray[Any]]) -> None:
    """Arrays of any shape, also empty ones."""
    message = RankMessage.decode(RankMessage(kind, fields, sent).encode())
    assert (message.kind, message.fields) == (kind, fields)
    for array, original in zip(message.arrays, sent, strict=True):
        assert array.dtype == original.dtype
        np.testing.assert_array_equal(array, original)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    ids = np.array(draw(st.lists(st.integers(0, 99), min_size=1, max_size=9)), dtype=np.int32)
    learned = draw(st.integers(0, len(ids) - 1))
    labels = np.where(np.arange(len(ids)) >= learned, ids, IGNORED).astype(np.int32)
    return Example(ids, labels, draw(st.none() | st.sampled_from(["a", "b"])))


@given(st.lists(examples(), min_size=1, max_size=6), st.data())
def test_examples_arrive_as_they_were_sent(sent: list[Example], data: st.DataObject) -> None:
    """Those of one process's share."""
    own = data.draw(st.lists(st.sampled_from(range(len(sent))), unique=True).map(sorted))
    fields, sent_arrays = to_message(sent)
    message = RankMessage.decode(RankMessage(Kind.STEP, fields, sent_arrays).encode())
    arrived = from_message(message.fields, message.arrays, own, _no_images)
    for example, index in zip(arrived, own, strict=True):
        np.testing.assert_array_equal(example.input_ids, sent[index].input_ids)
        np.testing.assert_array_equal(example.labels, sent[index].labels)
        assert example.sample_type == sent[index].sample_type


def _no_images(example: Example, images: Any) -> Example:
    pytest.fail(f"{len(images)} images of {example}")
