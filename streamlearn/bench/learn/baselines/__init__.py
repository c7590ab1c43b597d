"""Methods that are told where tasks begin and end, on the same adapter, optimizer and batches as the daemon's."""
