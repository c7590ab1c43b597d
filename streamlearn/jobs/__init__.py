"""Requests that need the model: other threads queue them, the loop runs them between two training steps."""
