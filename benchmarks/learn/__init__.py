"""Continual-learning benchmark: suites (streams of tasks), methods (learners) and scores (what is retained)."""
