"""What the processes of a run exchange: torch.distributed's collectives, called in the same order in each process.

Messages and states go over gloo; gradients and weights over nccl where they are on GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.distributed.process_rank import ProcessRank
from streamlearn.distributed.rank_message import RankMessage
from streamlearn.errors import RankLostError

LEADER = 0
LOADING_S = 600.0
"""Longest wait for the others while they load the backbone, from a cold disk maybe."""


class Channel:
    """A member of the group of processes. Waits for the others when it is made, and in each call."""

    def __init__(self, place: ProcessRank, device: torch.device, timeout_s: float, *, shard: bool = False) -> None:
        """Join the group.

        Args:
            place: This process.
            device: Where gradients and weights are.
            timeout_s: Longest wait for another process in one call.
            shard: Whether the processes divide the backbone among them.

        Raises:
            RankLostError: the others do not join, here; they are gone or do not answer, in each call.
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
        """What layers are gathered over, besides messages and beats; None unless the backbone is divided."""

    def send(self, message: RankMessage) -> None:
        """Send a message to all others; only the leader does."""
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
        """Return the states of all processes, (size, n), of this one's, (n,); n is the same for all."""
        own = torch.from_numpy(state.astype(np.uint8))
        states = [torch.empty_like(own) for _ in range(self.place.size)]
        with self._waiting():
            dist.all_gather(states, own)
        return torch.stack(states).bool().numpy()

    def add_up(self, tensor: Tensor) -> None:
        """Sum the tensors of all processes, in the leader's place; those of the others are undefined afterwards."""
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
                "restart goes on from the newest snapshot"
            ) from error
