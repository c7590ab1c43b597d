"""Change detection without task ids: each record's regime, and changes of the inputs or of the answers.

`monitor.Monitor` reads the inputs before training; `drift.ConceptDriftDetector` reads the losses after it. This package
needs no tokenizers, Pillow or torch.
"""
