"""Change detection without task ids: each record's regime, and changes of the inputs or of the answers.

`monitor.Monitor` reads the inputs before training; `drift.ConceptDriftDetector` reads the losses after it.
`drift_monitor.DriftMonitor` is the first by itself, for texts. The others need no tokenizers, Pillow or torch.
"""
