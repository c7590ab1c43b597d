"""Continual learning, measured: suites (what comes when), methods (who learns it), scores (what is left of it)."""
