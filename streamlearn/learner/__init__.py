"""Test, then train: one packed row, one loss, one guarded update; and evaluation on the same path."""
