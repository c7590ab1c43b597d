"""Requests that need the model: queued by other threads, served by the loop between two training steps."""
