"""The messages from the leader of a run, and torch.distributed's collectives.

Every process calls the same collectives in the same order. Messages and states go over gloo; gradients and weights over
nccl where they are on GPUs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn import codec
from streamlearn.distributed import ProcessRank
from streamlearn.errors import RankLostError
from streamlearn.stream.record import StoredExample


class Kind(StrEnum):
    """Requests of the leader."""

    BEAT = "beat"
    """Nothing: the leader is alive."""
    LOAD = "load"
    """Load the backbone."""
    STEP = "step"
    """Compute a share of a step."""
    FORWARD = "forward"
    """Take part in a pass that the leader makes on its own."""
    END = "end"
    """Exit."""


@dataclass(frozen=True)
class StepRequest:
    """A step to share out, and the changes since the last one."""

    number: int
    """The learner's number of the step."""
    parts: int
    """Forward passes of each process."""
    learned: int
    """Learned tokens of the batch."""
    examples: Sequence[StoredExample]
    slots: Sequence[int] | None
    """Regime slot of each example."""
    changed: Sequence[str]
    """Adapters whose weights follow."""
    removed: Sequence[str]
    """Adapters that no longer exist."""
    biases: Sequence[int]
    """Regime slots whose CP biases follow."""


@dataclass(frozen=True)
class RankMessage:
    """A message from the leader."""

    kind: Kind
    dtype: str = ""
    """Of the backbone, with `LOAD`."""
    with_gradient: bool = False
    """Whether the pass of `FORWARD` computes a gradient."""
    step: StepRequest | None = None
    """With `STEP`."""

    def encode(self) -> bytes:
        """Return the message as a safetensors file."""
        return save(codec.to_arrays(self))

    @classmethod
    def decode(cls, data: bytes) -> "RankMessage":
        """The inverse of `encode`."""
        return codec.from_arrays(cls, load(data))


LEADER = 0
LOADING_S = 600.0
"""Longest wait for the others to load the backbone, perhaps from a cold disk."""


class Channel:
    """Membership in the group of processes. Creating it, and each call, waits for the others."""

    def __init__(self, place: ProcessRank, device: torch.device, timeout_s: float, *, shard: bool = False) -> None:
        """Join the group.

        Args:
            place: This process.
            device: Where gradients and weights are.
            timeout_s: Longest wait for another process in one call.
            shard: Whether the processes divide the backbone among them.

        Raises:
            RankLostError: the others do not join; in each call, they are gone or do not answer.
        """
        self.place = place
        self.device = device
        self._timeout_s = timeout_s
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with self._waiting():
            dist.init_process_group(
                backend,
                timeout=timedelta(seconds=timeout_s),
                device_id=device if device.type == "cuda" else None,
            )
            self._while_loading = dist.new_group(timeout=timedelta(seconds=LOADING_S), backend="gloo")
            group = dist.new_group(timeout=timedelta(seconds=timeout_s)) if shard else None
        self.mesh = None if group is None else DeviceMesh.from_group(group, device.type)
        """Group that gathers layers, apart from messages and beats; None unless the backbone is divided."""

    def send(self, message: RankMessage) -> None:
        """Send a message to all others, from the leader."""
        data = torch.frombuffer(bytearray(message.encode()), dtype=torch.uint8)
        with self._waiting():
            dist.broadcast(torch.tensor([len(data)]), LEADER)
            dist.broadcast(data, LEADER)

    def receive(self) -> RankMessage:
        """Wait for the leader's next message."""
        length = torch.zeros(1, dtype=torch.long)
        with self._waiting():
            dist.broadcast(length, LEADER)
            data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, LEADER)
        return RankMessage.decode(data.numpy().tobytes())

    def exchange(self, state: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the states (size, n) of all processes, given this one's (n,)."""
        own = torch.from_numpy(state.astype(np.uint8))
        states = [torch.empty_like(own) for _ in range(self.place.size)]
        with self._waiting():
            dist.all_gather(states, own)
        return torch.stack(states).bool().numpy()

    def add_up(self, tensor: Tensor) -> None:
        """Sum the tensors of all processes in the leader's; the others' are undefined afterwards."""
        with self._waiting():
            dist.reduce(tensor, LEADER)

    def spread(self, tensor: Tensor) -> None:
        """Copy the leader's tensor to all others, in place."""
        with self._waiting():
            dist.broadcast(tensor, LEADER)

    def wait_for_all(self) -> None:
        """Return once all processes have called this, which may take as long as loading a backbone."""
        with self._waiting():
            dist.barrier(self._while_loading)

    def close(self) -> None:
        """Leave the group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's errors of communication are of this type and its subclasses
            reason = " ".join(str(error).split())[:300]
            raise RankLostError(
                f"rank {self.place.rank} of {self.place.size}: another process ended, or did not answer within "
                f"{self._timeout_s:g} s: {reason}; the log of the first process that failed has the cause, and a "
                "restart continues from the newest snapshot"
            ) from error
