"""What the daemon does about regimes: probe, consolidate, hold out records, measure forgetting."""
