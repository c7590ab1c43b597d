"""The routing state: what is written is read back, and nothing else is taken for one."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from streamlearn.codec import to_arrays
from streamlearn.errors import PublicationError
from streamlearn.publish import publication as routing_state
from tests.gateway.sample_publication import publish_sample, sample_state


def test_a_state_survives_a_round_trip(tmp_path: Path) -> None:
    """To the last bit, with every type."""
    state = routing_state.read(tmp_path, publish_sample(tmp_path))
    found, written = to_arrays(state), sample_state()
    assert found.keys() == written.keys()
    for name, array in written.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "data", [b"", b"{}", routing_state.to_bytes(sample_state())[:-1], save({"integers": np.zeros(8, np.int64)})]
)
def test_anything_else_is_an_error_with_its_path(tmp_path: Path, data: bytes) -> None:
    publication = publish_sample(tmp_path)
    (tmp_path / publication.routing).write_bytes(data)
    with pytest.raises(PublicationError, match=r"184\.safetensors: expected the arrays"):
        routing_state.read(tmp_path, publication)
