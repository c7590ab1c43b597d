"""Durable state: snapshots that survive a crash at any moment, the lock on their folder, the journal of batches."""
