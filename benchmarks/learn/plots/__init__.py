"""Plots of a suite's runs; they need matplotlib, an extra."""
