"""Who computes what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamlearn.distributed import ProcessRank, find_rank
from streamlearn.distributed.share import shares
from streamlearn.errors import ConfigError


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=40), st.integers(1, 9))
def test_every_record_has_one_process(lengths: list[int], size: int) -> None:
    """And the largest share exceeds the smallest by at most one record."""
    given_to = shares(lengths, size)
    assert sorted(index for own in given_to for index in own) == list(range(len(lengths)))
    assert all(own == sorted(own) for own in given_to)
    tokens = [sum(lengths[index] for index in own) for own in given_to]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_torchrun_says_which_process_this_is() -> None:
    """Without it a run has one process, and half its environment is an error that names what was found."""
    assert find_rank({"RANK": "x"}) == ProcessRank(rank=0, size=1, local_rank=0)
    place = find_rank({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})  # on the second of two hosts with four GPUs
    assert place == ProcessRank(rank=5, size=8, local_rank=1)
    assert not place.leads
    for environ in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "one", "LOCAL_RANK": "0"}):
        with pytest.raises(ConfigError, match="WORLD_SIZE': '2'"):
            find_rank(environ)
