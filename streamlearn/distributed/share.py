"""One process's share of a step, and the sum of all shares.

    g = sum_r sum_(i in share r) (n_i / n) grad L_i,     n_i learned tokens of part i, n of the batch          (1)

`oom_retry` eq. (1) over processes instead of parts. Each computes its terms; the leader gets the sum, clips it and
makes the update. The sum of loads and the records' figures travel in the same tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from itertools import islice
from math import prod
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.context import Slot, routing_context
from streamlearn.adapters.presets import slot_of
from streamlearn.errors import ConfigError, RankLostError
from streamlearn.learner.evaluate import ExampleScore, run_to_end, score
from streamlearn.learner.learner import Learner, PassTotals
from streamlearn.learner.loss import pack, packed_loss
from streamlearn.learner.memory import is_out_of_memory
from streamlearn.learner.optimizer import parameters_of
from streamlearn.stream.record import IGNORED, Example

# Passes that compute nothing of use, where the backbone is divided among processes (`backbone.shard`).
#
# A layer's weights are gathered by all processes at a time. When one of them makes a pass alone, to score records or to
# generate, or has more parts of a batch than the others, these make a pass over one token meanwhile.


_TOKENS = Example(np.zeros(2, dtype=np.int32), np.array([IGNORED, 0], dtype=np.int32))


def out_of_step(error: Exception) -> RankLostError:
    """The error of a process whose memory ran out while the others wait for its part of a layer."""
    reason = " ".join(str(error).split())[:160]
    return RankLostError(
        f"with backbone.shard, a pass that begins must be finished by all processes; memory ran out in one: {reason}; "
        "lower stream.batch_tokens, or set learner.activation_checkpointing"
    )


def dummy_pass(learner: Learner, *, with_gradient: bool) -> None:
    """Make a pass, and its backward pass too; weights, gradients and loads stay as they are."""
    parameters = learner.optimizer.parameters()
    gradients = [parameter.grad for parameter in parameters]
    loads = [bank.load_HK.clone() if bank.load_HK is not None else None for bank in learner.banks]
    slots = [slot_of(next(iter(learner.revisions)))] if learner.per_regime else None
    packed = pack([_TOKENS], learner.device, slots)
    with torch.set_grad_enabled(with_gradient), routing_context(learner.model, packed.context()):
        loss = packed_loss(learner.forward, packed)
    if with_gradient:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(loss.mean)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for bank, load in zip(learner.banks, loads, strict=True):
        if load is not None and bank.load_HK is not None:
            bank.load_HK.copy_(load)


# Messages from the leader to the others: a JSON object, and arrays behind it.
#
# 8 bytes     length of the object, little-endian
# object      orjson; `arrays` lists dtype and shape of each array
# arrays      their bytes, in order


_LENGTH = 8


class Kind(StrEnum):
    """What the leader asks for."""

    BEAT = "beat"
    """Nothing: the leader is alive."""
    LOAD = "load"
    """Load the backbone."""
    STEP = "step"
    """Compute a share of a step."""
    SCORE = "score"
    """Compute scores in one forward pass."""
    FORWARD = "forward"
    """Take part in a pass that the leader makes alone."""
    END = "end"
    """Exit."""


@dataclass(frozen=True)
class RankMessage:
    """One message."""

    kind: Kind
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[NDArray[Any]] = ()

    def encode(self) -> bytes:
        """Return the message as bytes."""
        arrays = [np.ascontiguousarray(array) for array in self.arrays]
        listed = [(array.dtype.str, array.shape) for array in arrays]
        head = orjson.dumps({"kind": self.kind, "fields": dict(self.fields), "arrays": listed})
        return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(array.tobytes() for array in arrays)])

    @classmethod
    def decode(cls, data: bytes) -> "RankMessage":
        """The inverse of `encode`."""
        start = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        head = orjson.loads(data[_LENGTH:start])
        arrays = []
        for dtype, shape in head["arrays"]:
            array = np.frombuffer(data, dtype=np.dtype(dtype), count=prod(shape), offset=start).reshape(shape)
            arrays.append(array)
            start += array.nbytes
        return cls(Kind(head["kind"]), head["fields"], arrays)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True)
class ProcessRank:
    """A process among those of one run."""

    rank: int = 0
    """Number of the process, from 0."""
    size: int = 1
    """Number of processes."""
    local_rank: int = 0
    """Number of the process on its host, from 0: that of its GPU."""

    @property
    def leads(self) -> bool:
        """Whether this process reads the stream and owns all state."""
        return self.rank == 0


def find_rank(environ: Mapping[str, str]) -> ProcessRank:
    """Read the variables that torchrun sets. Without them, or with one process, a run is not distributed.

    Raises:
        ConfigError: some of the variables are missing or no numbers.
    """
    found = {name: environ[name] for name in VARIABLES if name in environ}
    if "WORLD_SIZE" not in found:
        return ProcessRank()
    try:
        rank, size, local_rank = (int(found[name]) for name in VARIABLES)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(VARIABLES)} must all be numbers when WORLD_SIZE is set, found {found}: start the processes "
            "with torchrun, or unset WORLD_SIZE"
        ) from error
    return ProcessRank(rank, size, local_rank)


# What the processes of a run exchange: torch.distributed's collectives, called in the same order in each process.
#
# Messages and states go over gloo; gradients and weights over nccl where they are on GPUs.


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


# Shape suffixes: B records of the batch.


@dataclass(frozen=True)
class Share:
    """What one process computes of a batch."""

    own: Sequence[int]
    """Indices of its records, ascending."""
    examples: Sequence[Example]
    """These records."""
    slots: Sequence[int] | None
    """Their regime slots."""
    parts: int
    """Forward passes of each process."""
    num_records: int
    """Records of the batch."""
    tokens: int
    """Tokens of the batch."""
    learned: int
    """Learned tokens of the batch."""


def compute(channel: Channel, learner: Learner, share: Share, on_record: Callable[[int], None]) -> PassTotals:
    """Compute a share, of the adapters that are active, and add up all shares.

    Afterwards the leader's parameters have the gradients of the batch, and those of the others none.

    Returns:
        The figures of the batch; of use in the leader only.

    Raises:
        torch.OutOfMemoryError: a process ran out of memory, this one or another; no gradient is left.
    """
    totals, fault = _own(learner, share, on_record, in_step=channel.mesh is not None)
    parameters = parameters_of(learner.optimizer.active)
    state = [fault is not None, *(parameter.grad is not None for parameter in parameters)]
    states = channel.exchange(np.array(state))
    if states[:, 0].any():
        learner.optimizer.zero_grad()
        ranks = ", ".join(map(str, np.flatnonzero(states[:, 0])))
        raise torch.OutOfMemoryError(f"rank {ranks} ran out of memory{': ' if fault else ''}{fault or ''}")
    with_gradient = [parameters[index] for index in np.flatnonzero(states[:, 1:].any(0))]
    loads = [bank.load_HK for bank in learner.active_banks if bank.load_HK is not None]
    figures = _figures(totals, share, learner.device)
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in with_gradient]
    flat = torch.cat([tensor.flatten().float() for tensor in (figures, *loads, *gradients)])
    channel.add_up(flat)
    if not channel.place.leads:
        learner.optimizer.zero_grad()
        return totals
    summed = torch.split(flat, [tensor.numel() for tensor in (figures, *loads, *gradients)])
    for load, total in zip(loads, summed[1:], strict=False):
        load.copy_(total.view(load.shape))
    for parameter, total in zip(with_gradient, summed[1 + len(loads) :], strict=True):
        parameter.grad = total.view(parameter.shape)
    loss, losses_B, right_B = torch.split(summed[0], [1, share.num_records, share.num_records])
    return PassTotals(
        means=[loss[0]],
        weights=[1.0],
        losses=[losses_B],
        right=[right_B],
        tokens=share.tokens,
        learned_tokens=share.learned,
    )


def _own(
    learner: Learner, share: Share, on_record: Callable[[int], None], *, in_step: bool
) -> tuple[PassTotals, str | None]:
    """The figures of the share, and how memory ran out, if it did; `in_step`: all make the same number of passes."""
    totals, parts = PassTotals(), min(share.parts, len(share.examples))
    try:
        if parts:
            totals = learner.gradients(
                share.examples, share.slots, parts, lambda index: on_record(share.own[index]), learned=share.learned
            )
        else:
            for bank in learner.active_banks:
                bank.reset_load()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if in_step:
            raise out_of_step(error) from error
        return PassTotals(), " ".join(str(error).split())[:160]
    for _ in range(share.parts - parts if in_step else 0):
        dummy_pass(learner, with_gradient=True)
    return totals, None


def _figures(totals: PassTotals, share: Share, device: torch.device) -> Tensor:
    """Loss, losses and right answers of the share, each at its record's place in the batch, (1 + 2 B,)."""
    figures = torch.zeros(1 + 2 * share.num_records, device=device)
    if share.own and totals.means:
        own = torch.tensor(share.own).to(device, non_blocking=True)
        weights = torch.tensor(totals.weights).to(device, non_blocking=True)
        figures[0] = (torch.stack(totals.means) * weights).sum()
        figures[1 + own] = torch.cat(totals.losses)
        figures[1 + share.num_records + own] = torch.cat(totals.right)
    return figures


def shares(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Divide records so that the processes have nearly equal numbers of tokens.

    The longest record not yet given goes to the process with the fewest tokens (Graham 1969, LPT: at most 4/3 of the
    best division's largest share).

    Args:
        lengths: Tokens of each record.
        size: Number of processes.

    Returns:
        The indices of each process, ascending; empty where there are fewer records than processes.
    """
    given: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        rank = tokens.index(min(tokens))
        given[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(each) for each in given]


# Scores of records by several processes: each makes one forward pass of a round.
#
# The figures are those of the leader alone, bit for bit where the processes compute alike: each pass has the records
# that it would have there.


# Shape suffixes: B records of the round.


@dataclass(frozen=True)
class ScorePass:
    """What one process computes of a round."""

    own: Sequence[int]
    """Indices of its records; empty: it has none."""
    examples: Sequence[Example]
    """These records."""
    slots: Sequence[Slot] | None
    """What adapts each."""
    num_records: int
    """Records of the round."""


def compute_score_pass(channel: Channel, learner: Learner, own: ScorePass) -> list[tuple[float, int]]:
    """Make one pass and join the figures of all.

    Returns:
        Summed loss and correct tokens of each record of the round; of use in the leader only.

    Raises:
        torch.OutOfMemoryError: a process ran out of memory, this one or another.
    """
    scores, fault = _score_pass_own(channel, learner, own)
    faults = channel.exchange(np.array([fault is not None]))[:, 0]
    if faults.any():
        ranks = ", ".join(map(str, np.flatnonzero(faults)))
        raise torch.OutOfMemoryError(f"rank {ranks} ran out of memory{': ' if fault else ''}{fault or ''}")
    figures_B2 = torch.zeros(own.num_records, 2, dtype=torch.float64)
    for index, each in zip(own.own, scores, strict=True):
        figures_B2[index] = torch.tensor([each.loss_sum, each.correct])
    channel.add_up(figures_B2)
    return [(loss_sum, int(correct)) for loss_sum, correct in figures_B2.tolist()]


def _score_pass_own(channel: Channel, learner: Learner, own: ScorePass) -> tuple[list[ExampleScore], str | None]:
    """The scores of the records, and how memory ran out, if it did."""
    if not own.own:
        if channel.mesh is not None:
            dummy_pass(learner, with_gradient=False)
        return [], None
    tokens = sum(map(len, own.examples))
    try:
        work = score(learner.model, own.examples, learner.device, pack_tokens=tokens, slots=own.slots)
        return run_to_end(work), None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if channel.mesh is not None:
            raise out_of_step(error) from error
        return [], " ".join(str(error).split())[:160]


Restored = Callable[[Example, Sequence[bytes]], Example]
"""`Decoder.restored`: an example with its images, given their bytes."""


def to_message(examples: Sequence[Example]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return fields and arrays of a message that `from_message` reads."""
    images = [image.data for example in examples for image in example.images]
    fields = {
        "types": [example.sample_type for example in examples],
        "images": [len(example.images) for example in examples],
    }
    arrays = [
        np.array([len(example) for example in examples]),
        np.concatenate([example.input_ids for example in examples]),
        np.concatenate([example.labels for example in examples]),
        np.array([len(data) for data in images], dtype=np.int64),
        np.frombuffer(b"".join(images), dtype=np.uint8),
    ]
    return fields, arrays


def from_message(
    fields: Mapping[str, Any], arrays: Sequence[NDArray[Any]], own: Sequence[int], restored: Restored
) -> list[Example]:
    """Return the examples with these indices."""
    lengths, input_ids, labels, image_lengths, image_data = arrays
    cuts = np.cumsum(lengths)[:-1]
    parts = list(zip(np.split(input_ids, cuts), np.split(labels, cuts), fields["types"], strict=True))
    pieces = iter(np.split(image_data, np.cumsum(image_lengths)[:-1]))
    images = [[bytes(piece) for piece in islice(pieces, count)] for count in fields["images"]]
    return [
        restored(Example(*parts[index]), images[index]) if images[index] else Example(*parts[index]) for index in own
    ]
