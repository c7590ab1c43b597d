"""What every process but the leader does: wait for a message, compute a share of the step, and wait again."""

from itertools import accumulate

import torch

from streamlearn.adapters.config import slot_of
from streamlearn.adapters.sequences import Slot
from streamlearn.distributed import score_pass, share, weights
from streamlearn.distributed.channel import Channel
from streamlearn.distributed.dummy_pass import dummy_pass
from streamlearn.distributed.examples import Restored, from_message
from streamlearn.distributed.rank_message import Kind, RankMessage
from streamlearn.distributed.score_pass import ScorePass
from streamlearn.distributed.share import Share
from streamlearn.distributed.shares import shares
from streamlearn.learner.learner import Learner


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
        score_pass.compute(
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
    weights.receive(channel, learner, changed, message.fields["biases"])
