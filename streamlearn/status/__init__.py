"""What is published: one immutable status, the board it is swapped on, and timings."""
