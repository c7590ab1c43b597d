"""Ways of running the daemon that are worse, and are there to show by how much."""

from dataclasses import replace
from typing import Any

from streamlearn.assembly import Rooms
from streamlearn.shift.outlook import Sighted
from streamlearn.stream.batch import Batch


def plain_adamw(rooms: Rooms) -> None:
    """Every expert is updated in every step, also one that got no token: momentum and weight decay move it."""
    for group in rooms.learner.optimizer.groups:
        group.load_HK = None


def one_bias_a_stretch(rooms: Rooms) -> None:
    """Every record is routed with the bias of the regime entered last, wherever its own sketch would put it."""
    monitor: Any = rooms.adaptation.monitor
    decide, entered = monitor.look, [0]

    def stretch(sighted: Sighted) -> Sighted:
        for shift in sighted.shifts:
            if shift.kind == "inputs":
                entered[0] = shift.slot
        return replace(sighted, slots=(entered[0],) * len(sighted.slots))

    def look(batch: Batch) -> list[Sighted]:
        return [stretch(each) for each in decide(batch)]

    flush = monitor.flush
    monitor.look = look
    monitor.flush = lambda: [stretch(each) for each in flush()]
