"""Connectors: sources of records and sinks of dead letters, which implement `streamlearn.stream.source`."""
