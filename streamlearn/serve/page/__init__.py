"""The page at `/`: static files that read the monitoring endpoints from a browser."""
