"""The leader's side of a run in several processes.

It owns all state: it alone reads, detects, decides, makes updates, writes snapshots and answers requests. The others
wait for messages. Between two of them it shows that it is alive by beats, from a thread of its own, as long as the loop
itself is alive.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.context import NO_REGIME, Slot, adapters_of
from streamlearn.adapters.presets import regime_adapter, slot_of
from streamlearn.distributed import share
from streamlearn.distributed import share as score_pass
from streamlearn.distributed.share import (
    Channel,
    Kind,
    RankMessage,
    Restored,
    ScorePass,
    Share,
    dummy_pass,
    from_message,
    shares,
    to_message,
)
from streamlearn.errors import RankLostError
from streamlearn.learner.evaluate import ExampleScore, groups
from streamlearn.learner.learner import Learner, PassTotals
from streamlearn.stream.record import Example


class Leader:
    """Leads the processes of a run. Only the thread that owns the model calls it."""

    def __init__(self, channel: Channel, *, beat_s: float, alive: Callable[[], bool]) -> None:
        """Start to send beats every `beat_s` seconds while `alive` returns true."""
        self._channel = channel
        self._alive = alive
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._lost: RankLostError | None = None
        self._learner: Learner | None = None
        self._loading = False
        self._sharing = False
        """Whether the others take part in what is computed."""
        self._sent: dict[str, int] = {}
        """Adapters that the others have -> the revision they have."""
        self._beats = threading.Thread(target=self._beat, args=(beat_s,), name="beats", daemon=True)
        self._beats.start()

    @property
    def mesh(self) -> DeviceMesh | None:
        """What the backbone is divided over; None: each process has all of it."""
        return self._channel.mesh

    def load(self, dtype: str) -> None:
        """Have the others load the backbone in this dtype."""
        self._loading = True  # the others answer no beat until they have loaded
        self._send(RankMessage(Kind.LOAD, {"dtype": dtype}))

    def lead(self, learner: Learner) -> None:
        """Share out the steps of a learner from now on. Waits until the others have loaded theirs."""
        with self._with_turn():
            self._channel.wait_for_all()
            self._loading = False
        self._learner = learner
        learner.passes, learner.score = self._gradients, self._scores
        if self._channel.mesh is not None:
            learner.forward.get_decoder().register_forward_pre_hook(lambda *_: self._before_pass())

    def end(self) -> None:
        """Let the others end, unless one of them is gone."""
        self._ended.set()
        self._beats.join()
        if self._lost is None and not self._loading:  # who waits for the rest to load fails when the group is left
            self._send(RankMessage(Kind.END))

    def _gradients(
        self, examples: Sequence[Example], slots: Sequence[int] | None, parts: int, on_record: Callable[[int], None]
    ) -> PassTotals:
        """`Learner.passes`: share out a batch.

        Record by record, the leader computes alone: after a crash, the record under way must be known.
        """
        learner = self._learner
        assert learner is not None, "`lead` was called"
        if parts >= len(examples):
            return learner.gradients(examples, slots, parts, on_record)
        lengths = [len(example) for example in examples]
        learned = sum(example.num_learned for example in examples)
        own = shares(lengths, self._channel.place.size)[self._channel.place.rank]
        fields = {"parts": parts, "learned": learned, "number": learner.number}
        with self._with_turn(), self._shared():
            self._ask(Kind.STEP, examples, slots, learner.active_adapters, fields)
            return share.compute(
                self._channel,
                learner,
                Share(
                    own=own,
                    examples=[examples[index] for index in own],
                    slots=None if slots is None else [slots[index] for index in own],
                    parts=parts,
                    num_records=len(examples),
                    tokens=sum(lengths),
                    learned=learned,
                ),
                on_record,
            )

    def _scores(
        self, examples: Sequence[Example], slots: Sequence[Slot] | None, *, pack_tokens: int
    ) -> Generator[None, None, list[ExampleScore]]:
        """`Learner.score`: as many passes at a time as there are processes; a single one is the leader's."""
        learner, size = self._learner, self._channel.place.size
        assert learner is not None, "`lead` was called"
        found: list[ExampleScore] = []
        passes = list(groups(examples, pack_tokens))
        for round_ in (passes[start : start + size] for start in range(0, len(passes), size)):
            first, last = round_[0][0], round_[-1][-1] + 1
            some, their_slots = examples[first:last], None if slots is None else slots[first:last]
            is_of_active = slots is None and learner.per_regime
            if len(round_) == 1 or learner.has_other_weights or is_of_active:
                found += yield from learner.score_here(some, their_slots, pack_tokens=pack_tokens)
                continue
            own = round_[0]
            with self._with_turn(), self._shared():
                fields = {"records": [len(group) for group in round_]}
                self._ask(Kind.SCORE, some, their_slots, _used(learner, their_slots), fields)
                slots_of_own = None if their_slots is None else their_slots[: len(own)]
                task = ScorePass(range(len(own)), some[: len(own)], slots_of_own, len(some))
                figures = score_pass.compute_score_pass(self._channel, learner, task)
            found += [
                ExampleScore(loss_sum, correct, each.num_learned)
                for (loss_sum, correct), each in zip(figures, some, strict=True)
            ]
            yield
        return found

    def _ask(
        self,
        kind: Kind,
        examples: Sequence[Example],
        slots: Sequence[Slot] | None,
        adapters: Sequence[str],
        fields: Mapping[str, Any],
    ) -> None:
        """Send examples, and what the others lack of the adapters that they need for them."""
        learner = self._learner
        assert learner is not None, "`lead` was called"
        changed = [name for name in adapters if self._sent.get(name) != learner.revisions[name]]
        biases = sorted({slot for slot in slots or () if isinstance(slot, int) and slot != NO_REGIME})
        of_examples, arrays = to_message(examples)
        sent = {
            **of_examples,
            **fields,
            "slots": None if slots is None else list(slots),
            "changed": changed,
            "gone": sorted(self._sent.keys() - learner.revisions.keys()),
            "biases": biases,
        }
        self._channel.send(RankMessage(kind, sent, arrays))
        send(self._channel, learner, changed, biases)
        self._sent = {name: revision for name, revision in self._sent.items() if name in learner.revisions}
        self._sent |= {name: learner.revisions[name] for name in changed}

    def _before_pass(self) -> None:
        """Have the others take part in a pass that is not part of a shared step."""
        if not self._sharing:
            self._send(RankMessage(Kind.FORWARD, {"with_gradient": torch.is_grad_enabled()}))

    def _send(self, message: RankMessage) -> None:
        with self._with_turn():
            self._channel.send(message)

    @contextmanager
    def _with_turn(self) -> Iterator[None]:
        """Nobody else sends meanwhile; after a process was lost, nobody does.

        An error leaves the others waiting for what does not come, unless memory ran out, which all processes are told.
        """
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                yield
            except torch.OutOfMemoryError:
                raise
            except RankLostError as error:
                self._lost = error
                raise
            except BaseException as error:
                self._lost = RankLostError(f"rank 0 failed while the others computed with it: {error!r}; restart")
                raise

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """The others know of the passes inside the block."""
        self._sharing = True
        try:
            yield
        finally:
            self._sharing = False

    def _beat(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            try:
                with self._with_turn():
                    if self._alive() and not self._loading:
                        self._channel.send(RankMessage(Kind.BEAT))
            except RankLostError:  # the next turn of the loop raises it
                return


def _used(learner: Learner, slots: Sequence[Slot] | None) -> list[str]:
    """The adapters that records in these slots are computed with."""
    if not learner.per_regime:
        return list(learner.revisions)
    used = {each for slot in slots or () if slot != NO_REGIME for each in adapters_of(slot)[0]}
    return [regime_adapter(slot) for slot in sorted(used)]


def wait_for_load(channel: Channel) -> str | None:
    """Wait until the leader has the backbone loaded, and return in which dtype; None: it ended the run before.

    Raises:
        RankLostError: as `follow`.
    """
    while (message := channel.receive()).kind is Kind.BEAT:
        pass
    return message.fields["dtype"] if message.kind is Kind.LOAD else None


def follow(channel: Channel, learner: Learner, restored: Restored) -> None:
    """Wait until all have loaded, and compute shares of steps until the leader ends the run.

    Args:
        channel: To the leader.
        learner: This process's.
        restored: Decodes the images of an example.

    Raises:
        RankLostError: the leader, or another process, is gone or does not answer.
    """
    channel.wait_for_all()
    while (message := channel.receive()).kind is not Kind.END:
        if message.kind is Kind.STEP:
            _step(channel, learner, restored, message)
        elif message.kind is Kind.SCORE:
            _score(channel, learner, restored, message)
        elif message.kind is Kind.FORWARD:
            dummy_pass(learner, with_gradient=message.fields["with_gradient"])


def _step(channel: Channel, learner: Learner, restored: Restored, message: RankMessage) -> None:
    """Take over what changed, and compute a share."""
    fields, rank = message.fields, channel.place.rank
    _update(channel, learner, message)
    lengths = message.arrays[0].tolist()
    own = shares(lengths, channel.place.size)[rank]
    slots = fields["slots"]
    learner.activate(slots)
    # Routing noise is drawn as in a run that did not stop before this step.
    torch.manual_seed(fields["number"] * channel.place.size + rank)
    try:
        share.compute(
            channel,
            learner,
            Share(
                own=own,
                examples=from_message(fields, message.arrays, own, restored),
                slots=None if slots is None else [slots[index] for index in own],
                parts=fields["parts"],
                num_records=len(lengths),
                tokens=sum(lengths),
                learned=fields["learned"],
            ),
            lambda _: None,
        )
    except torch.OutOfMemoryError:
        return  # the leader tries again with more parts, or gives up


def _score(channel: Channel, learner: Learner, restored: Restored, message: RankMessage) -> None:
    """Take over what changed, and make a pass over this process's records, if it has any."""
    fields, rank = message.fields, channel.place.rank
    _update(channel, learner, message)
    ends = list(accumulate(fields["records"], initial=0))
    own = range(ends[rank], ends[rank + 1]) if rank < len(fields["records"]) else range(0)
    slots = None if fields["slots"] is None else [_slot(fields["slots"][index]) for index in own]
    try:
        score_pass.compute_score_pass(
            channel, learner, ScorePass(own, from_message(fields, message.arrays, own, restored), slots, ends[-1])
        )
    except torch.OutOfMemoryError:
        return  # the leader reports it


def _slot(sent: int | list[int]) -> Slot:
    """The inverse of its JSON form."""
    return sent if isinstance(sent, int) else tuple(sent)


def _update(channel: Channel, learner: Learner, message: RankMessage) -> None:
    """Have the adapters that changed, and no longer those that are gone."""
    changed, gone = message.fields["changed"], message.fields["gone"]
    if learner.per_regime:
        for name in changed:
            if name not in learner.revisions:
                learner.add_regime(slot_of(name), seed=0)  # every weight is replaced
        if gone:
            learner.keep_regimes([slot_of(name) for name in learner.revisions if name not in gone])
    receive(channel, learner, changed, message.fields["biases"])


# Weights from the leader to the others.
#
# The leader alone makes updates, so it sends what has changed since an adapter was last sent: as many bytes as the
# second
# half of an all-reduce. The others then have its bits, and need no optimizer state to compute the next gradients.


def send(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Send adapters, and the CP biases of regime slots."""
    tensors = [*(tensor for name in adapters for tensor in learner.weights(name).values()), *_biases(learner, slots)]
    if tensors:
        channel.spread(torch.cat([tensor.detach().flatten() for tensor in tensors]))


@torch.no_grad()
def receive(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Take over what `send` sends; the learner has all of the adapters."""
    own = {name: learner.weights(name) for name in adapters}
    biases = _biases(learner, slots)
    tensors = [*(tensor for weights in own.values() for tensor in weights.values()), *biases]
    if not tensors:
        return
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), device=channel.device)
    channel.spread(flat)
    parts = iter(torch.split(flat, [tensor.numel() for tensor in tensors]))
    for name, weights in own.items():
        learner.load_weights(name, {key: next(parts).view(tensor.shape) for key, tensor in weights.items()})
    for bias in biases:
        bias.copy_(next(parts).view(bias.shape))


def _biases(learner: Learner, slots: Sequence[int]) -> list[Tensor]:
    """CP biases of the slots, views of each bank's (H, K, N)."""
    return [bank.bias_HKN[:, :, slot] for bank in learner.banks if bank.bias_HKN is not None for slot in slots]
