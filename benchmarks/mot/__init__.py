"""Mixture-of-transformers benchmark: the claims of the MoT paper, tested on its own synthetic data.

    python -m benchmarks.mot > mot.json

Li et al., "Mixture-of-Transformers Learn Faster: A Theoretical Study on Classification Problems"; equations, lemmas,
definitions and theorems are cited by the paper's numbers.
"""
