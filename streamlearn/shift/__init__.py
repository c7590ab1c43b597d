"""Change detection without task ids: each record's regime, and changes of the inputs or of the answers.

`Monitor` reads the inputs before training; `ConceptDriftDetector` reads the losses after it.
"""

from streamlearn.shift.assigned_batch import AssignedBatch
from streamlearn.shift.concept_drift_detector import ConceptDriftDetector
from streamlearn.shift.monitor import Monitor
from streamlearn.shift.shift import Shift

__all__ = ["AssignedBatch", "ConceptDriftDetector", "Monitor", "Shift"]
