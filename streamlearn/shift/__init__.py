"""Shifts, without task ids: which regime each record belongs to, and when its inputs or its answers change.

`Monitor` sees the inputs ahead of training; `ConceptDriftDetector` sees the losses after it.
"""

from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.concept_drift_detector import ConceptDriftDetector
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.regime_memory import RegimeSummary
from streamlearn.shift.shift import Shift

__all__ = ["AssignedBatch", "ConceptDriftDetector", "Monitor", "RegimeSummary", "Shift"]
