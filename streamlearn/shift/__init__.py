"""Change detection without task ids: each record's regime, and changes of the inputs or of the answers.

`monitor.Monitor` reads the inputs before training; `concept_drift_detector.ConceptDriftDetector` reads the losses after
it. This module imports neither: what only routes requests needs no detector.
"""
