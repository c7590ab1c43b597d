"""The training step (test, then train), its optimizer and regularizers, and evaluation on the same forward pass."""
