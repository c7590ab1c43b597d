"""Kills at random moments, crash states and damage: `make crash N=300`, and a few of each in every test run."""
