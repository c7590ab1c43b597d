"""What is kept about each regime, and how a batch meets it: enter, hold out, train, measure, route."""
