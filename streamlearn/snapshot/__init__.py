"""Durable state: crash-safe snapshots, the lock on their folder, the batch journal, and the crash guard."""
