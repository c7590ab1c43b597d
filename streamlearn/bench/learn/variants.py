"""Ways of running the daemon that are worse, and are there to show by how much."""

from dataclasses import replace
from typing import Any

from streamlearn.runtime.components import Components
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.stream.batch import Batch


def plain_adamw(components: Components) -> None:
    """Every expert is updated in every step, also one that got no token: momentum and weight decay move it."""
    for group in components.learner.optimizer.groups:
        group.load_HK = None


def one_bias_a_stretch(components: Components) -> None:
    """Every record is routed with the bias of the regime entered last, wherever its own sketch would put it."""
    monitor: Any = components.adaptation.monitor
    decide, entered = monitor.update, [0]

    def stretch(assigned: AssignedBatch) -> AssignedBatch:
        for shift in assigned.shifts:
            if shift.kind == "inputs":
                entered[0] = shift.slot
        return replace(assigned, slots=(entered[0],) * len(assigned.slots))

    def update(batch: Batch) -> list[AssignedBatch]:
        return [stretch(each) for each in decide(batch)]

    flush = monitor.flush
    monitor.update = update
    monitor.flush = lambda: [stretch(each) for each in flush()]
