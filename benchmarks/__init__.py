"""Benchmarks: one command each, one JSON object as the result."""
