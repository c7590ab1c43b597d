"""What other programs compute with exported regimes, compared with the daemon."""
