"""Experiment trackers: the run's series for TensorBoard and MLflow, read from the published status."""
