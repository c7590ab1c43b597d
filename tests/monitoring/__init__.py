"""Alert rules, dashboard and scrape configuration: unit tests, and a campaign that fires each alert by a fault."""
