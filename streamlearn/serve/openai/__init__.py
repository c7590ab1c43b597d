"""OpenAI's paths, answered from the daemon's own weights."""
