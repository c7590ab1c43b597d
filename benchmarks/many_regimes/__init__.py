"""What many regimes cost, measured in the daemon."""
