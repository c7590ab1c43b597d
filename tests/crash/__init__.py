"""Kill -9 at seeded moments, and what is left: `make crash N=300`, and a few kills in every run of the suite."""
