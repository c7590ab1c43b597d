"""Variants of the daemon that no setting can produce, for ablations."""

from dataclasses import replace
from typing import Any

from streamlearn.runtime.components import Components
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.stream.batch import Batch


def plain_adamw(components: Components) -> None:
    """Update every expert in every step: momentum and weight decay also move experts that received no token."""
    for group in components.learner.optimizer.groups:
        group.load_HK = None


def one_bias_per_segment(components: Components) -> None:
    """Route every record with the bias of the most recently entered regime instead of that of its own regime."""
    monitor: Any = components.adaptation.monitor
    update, flush = monitor.update, monitor.flush
    entered = 0

    def with_one_slot(assigned: AssignedBatch) -> AssignedBatch:
        nonlocal entered
        for shift in assigned.shifts:
            if shift.kind == "inputs":
                entered = shift.slot
        return replace(assigned, slots=(entered,) * len(assigned.slots))

    def update_with_one_slot(batch: Batch) -> list[AssignedBatch]:
        return [with_one_slot(each) for each in update(batch)]

    monitor.update = update_with_one_slot
    monitor.flush = lambda: [with_one_slot(each) for each in flush()]
