"""OpenAI's HTTP API: requests, errors and names of models, for everything that speaks it. Imports no torch."""
