"""Variants of the daemon that no setting can produce, for ablations."""

from dataclasses import replace
from typing import Any

from streamlearn.runtime.components import Components
from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.lookahead import HeldBatch
from streamlearn.stream.batch import Batch


def plain_adamw(components: Components) -> None:
    """Update every expert in every step: momentum and weight decay also move experts that received no token."""
    for group in components.learner.optimizer.groups:
        group.load_HK = None


def one_bias_per_segment(components: Components) -> None:
    """Route every record with the bias of the most recently entered regime instead of that of its own regime."""
    lookahead: Any = components.adaptation.monitor.lookahead
    assigned_by_record = lookahead.assigned
    entered = 0

    def assigned(batch: Batch, held: HeldBatch) -> AssignedBatch:
        nonlocal entered
        by_record: AssignedBatch = assigned_by_record(batch, held)
        for shift in by_record.shifts:
            if shift.kind == "inputs":
                entered = shift.slot
        return replace(by_record, slots=(entered,) * len(by_record.slots))

    lookahead.assigned = assigned
