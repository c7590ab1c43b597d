"""A run in several processes: the leader's side, and the side of the processes that follow it.

The leader owns all state: it alone reads, detects, decides, makes updates, writes snapshots and answers requests. The
others wait for messages. Between two messages the leader shows that it is alive by beats, from a thread of its own, as
long as the loop itself is alive.

The leader alone makes updates, so with each step it sends the adapters that have changed since they were last sent: as
many bytes as the second half of an all-reduce. The others then have its bits, and need no optimizer state.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamlearn.adapters.context import NO_REGIME
from streamlearn.adapters.presets import slot_of
from streamlearn.distributed import share
from streamlearn.distributed.channel import Channel, Kind, RankMessage, StepRequest
from streamlearn.distributed.share import Share, dummy_pass, shares
from streamlearn.errors import RankLostError
from streamlearn.learner.learner import Learner, PassTotals
from streamlearn.stream.record import Example, StoredExample

RestoreImages = Callable[[Example, Sequence[bytes]], Example]
"""`Decoder.with_images`: an example with its images, given their bytes."""


class Leader:
    """Leads the processes of a run. Only the thread that owns the model calls it."""

    def __init__(self, channel: Channel, *, beat_s: float, alive: Callable[[], bool]) -> None:
        """Start to send beats every `beat_s` seconds while `alive` returns true."""
        self._channel = channel
        self._alive = alive
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._lost: RankLostError | None = None
        self._loading = False
        self._sharing = False
        """Whether the others take part in the current passes."""
        self._sent: dict[str, int] = {}
        """Revision of each adapter that the others have."""
        self._beats = threading.Thread(target=self._beat, args=(beat_s,), name="beats", daemon=True)
        self._beats.start()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The processes that divide the backbone; None: each process has all of it."""
        return self._channel.mesh

    def load(self, dtype: str) -> None:
        """Have the others load the backbone in this dtype."""
        self._loading = True  # the others answer no beat until they have loaded
        self._send(RankMessage(Kind.LOAD, dtype=dtype))

    def lead(self, learner: Learner) -> None:
        """Wait until the others have loaded; `learner` was created with `compute`."""
        with self._with_turn():
            self._channel.wait_for_all()
            self._loading = False
        if self._channel.mesh is not None:
            learner.forward.get_decoder().register_forward_pre_hook(lambda *_: self._before_pass())

    def end(self) -> None:
        """Let the others end, unless one of them is lost."""
        self._ended.set()
        self._beats.join()
        if self._lost is None and not self._loading:  # a process that waits for the rest to load fails on its own
            self._send(RankMessage(Kind.END))

    def compute(
        self,
        learner: Learner,
        examples: Sequence[Example],
        slots: Sequence[int] | None,
        parts: int,
        on_record: Callable[[int], None],
    ) -> PassTotals:
        """Share out the gradients of a batch; the `compute` of a `Learner`.

        Record by record, the leader computes on its own: after a crash, the record in progress must be known.
        """
        if parts >= len(examples):
            return learner.gradients(examples, slots, parts, on_record)
        request = StepRequest(
            number=learner.number,
            parts=parts,
            learned=sum(example.num_learned for example in examples),
            examples=[StoredExample.from_example(example) for example in examples],
            slots=slots,
            changed=[name for name in learner.active_adapters if self._sent.get(name) != learner.revisions[name]],
            removed=sorted(self._sent.keys() - learner.revisions.keys()),
            biases=sorted({slot for slot in slots or () if slot != NO_REGIME}),
        )
        with self._with_turn(), self._shared():
            self._channel.send(RankMessage(Kind.STEP, step=request))
            send(self._channel, learner, request.changed, request.biases)
            self._sent = {name: revision for name, revision in self._sent.items() if name in learner.revisions}
            self._sent |= {name: learner.revisions[name] for name in request.changed}
            own = _own_share(self._channel, request, examples.__getitem__)
            return share.compute(self._channel, learner, own, on_record)

    def _before_pass(self) -> None:
        """Have the others take part in a pass that is not part of a shared step."""
        if not self._sharing:
            self._send(RankMessage(Kind.FORWARD, with_gradient=torch.is_grad_enabled()))

    def _send(self, message: RankMessage) -> None:
        with self._with_turn():
            self._channel.send(message)

    @contextmanager
    def _with_turn(self) -> Iterator[None]:
        """Be the only sender inside the block. After a process was lost, nothing is sent.

        An error leaves the others waiting for messages that never come, except out of memory, which all processes know.
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


def wait_for_load(channel: Channel) -> str | None:
    """Wait until the leader has the backbone loaded, and return in which dtype; None: it ended the run before.

    Raises:
        RankLostError: as `follow`.
    """
    while (message := channel.receive()).kind is Kind.BEAT:
        pass
    return message.dtype if message.kind is Kind.LOAD else None


def follow(channel: Channel, learner: Learner, restore_images: RestoreImages) -> None:
    """Wait until all have loaded, and compute shares of steps until the leader ends the run.

    Args:
        channel: To the leader.
        learner: This process's.
        restore_images: Decodes the images of an example.

    Raises:
        RankLostError: the leader, or another process, is gone or does not answer.
    """
    channel.wait_for_all()
    while (message := channel.receive()).kind is not Kind.END:
        if message.step is not None:
            _follow_step(channel, learner, restore_images, message.step)
        elif message.kind is Kind.FORWARD:
            dummy_pass(learner, with_gradient=message.with_gradient)


def _follow_step(channel: Channel, learner: Learner, restore_images: RestoreImages, request: StepRequest) -> None:
    """Apply the changes, and compute a share."""
    if learner.per_regime:
        for name in request.changed:
            if name not in learner.revisions:
                learner.add_regime(slot_of(name), seed=0)  # every weight is replaced
        if request.removed:
            learner.keep_regimes([slot_of(name) for name in learner.revisions if name not in request.removed])
    receive(channel, learner, request.changed, request.biases)
    learner.activate(request.slots)
    # Routing noise is drawn as in a run that did not stop before this step.
    torch.manual_seed(request.number * channel.place.size + channel.place.rank)
    own = _own_share(channel, request, lambda index: request.examples[index].restored(restore_images))
    try:
        share.compute(channel, learner, own, lambda _: None)
    except torch.OutOfMemoryError:
        return  # the leader tries again with more parts, or gives up


def _own_share(channel: Channel, request: StepRequest, example_at: Callable[[int], Example]) -> Share:
    """Return the share of this process; `example_at` returns the example with an index."""
    lengths = [len(example.input_ids) for example in request.examples]
    own = shares(lengths, channel.place.size)[channel.place.rank]
    return Share(
        own=own,
        examples=[example_at(index) for index in own],
        slots=None if request.slots is None else [request.slots[index] for index in own],
        parts=request.parts,
        num_records=len(lengths),
        learned=request.learned,
    )


def send(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Send the weights of adapters, and the CP biases of regime slots."""
    tensors = [*(tensor for name in adapters for tensor in learner.weights(name).values()), *_biases(learner, slots)]
    if tensors:
        channel.spread(torch.cat([tensor.detach().flatten() for tensor in tensors]))


@torch.no_grad()
def receive(channel: Channel, learner: Learner, adapters: Sequence[str], slots: Sequence[int]) -> None:
    """Receive what `send` sends, in place; the learner has all of the adapters."""
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
    """Return the CP biases of the slots, views of each bank's (H, K, N)."""
    return [bank.bias_HKN[:, :, slot] for bank in learner.banks if bank.bias_HKN is not None for slot in slots]
