"""What a fleet of model servers is given: adapters under versioned names, and the state that routes requests."""
