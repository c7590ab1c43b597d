"""The container files, and the demo."""
