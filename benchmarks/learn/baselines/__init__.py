"""Methods that are given the task boundaries, on the daemon's adapter, optimizer and batches."""
