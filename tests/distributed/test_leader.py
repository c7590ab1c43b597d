"""The leader: failures in shared steps, and beats."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from streamlearn.distributed import ProcessRank, share
from streamlearn.distributed.channel import Kind, RankMessage
from streamlearn.distributed.processes import Leader
from streamlearn.errors import RankLostError
from streamlearn.stream.record import Example
from tests.learners import MakeLearner

TWO = [Example(np.arange(1, 6, dtype=np.int32), np.arange(1, 6, dtype=np.int32)) for _ in range(2)]


class Sent:
    """A channel to nobody, which keeps what is sent."""

    place = ProcessRank(rank=0, size=2)
    mesh = None

    def __init__(self) -> None:
        self.kinds: list[Kind] = []

    def send(self, message: RankMessage) -> None:
        self.kinds.append(message.kind)

    def spread(self, tensor: torch.Tensor) -> None:
        """Weights."""

    def wait_for_all(self) -> None:
        """Nobody loads."""


@pytest.fixture
def channel() -> Sent:
    return Sent()


@pytest.fixture
def leader(channel: Sent) -> Leader:
    return Leader(channel, beat_s=60.0, alive=lambda: True)  # type: ignore[arg-type]


def test_after_an_error_in_a_shared_step_nothing_is_sent(
    make_learner: MakeLearner, channel: Sent, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for what does not come, so any message would be taken for something else."""
    learner = make_learner(preset="lora", compute=leader.compute)
    leader.lead(learner)
    monkeypatch.setattr(share, "compute", Mock(side_effect=ValueError("a defect")))
    with pytest.raises(ValueError, match="a defect"):
        learner.step(TWO)
    with pytest.raises(RankLostError, match="a defect"):
        learner.step(TWO)
    leader.end()
    assert channel.kinds == [Kind.STEP]


def test_memory_that_runs_out_is_known_to_all(
    make_learner: MakeLearner, channel: Sent, leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is tried again in more parts, in the end record by record by the leader alone, and the run goes on."""
    learner = make_learner(preset="lora", compute=leader.compute)
    leader.lead(learner)
    monkeypatch.setattr(share, "compute", Mock(side_effect=torch.OutOfMemoryError("rank 1 ran out of memory")))
    assert learner.step(TWO).refusal is None
    leader.end()
    assert channel.kinds == [Kind.STEP, Kind.END]


def test_beats_are_sent_while_the_loop_is_alive(channel: Sent) -> None:
    """Not while the others load."""
    alive = [True]
    leader = Leader(channel, beat_s=0.001, alive=lambda: alive[0])  # type: ignore[arg-type]
    while channel.kinds.count(Kind.BEAT) < 3:
        pass
    leader.load("float32")
    loading = len(channel.kinds)
    leader._ended.wait(0.05)
    assert channel.kinds[loading:] == []
    leader.end()
