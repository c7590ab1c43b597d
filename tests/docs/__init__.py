"""The documents: links lead somewhere, and the commands that are marked as runnable run."""
