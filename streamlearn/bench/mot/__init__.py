"""Do transformers as experts learn faster? The claims of the MoT paper on its own synthetic data.

    streamlearn bench mot --json --plot mot.png

Li et al., "Mixture-of-Transformers Learn Faster: A Theoretical Study on Classification Problems"; equations, lemmas and
so on are cited by the paper's own numbers.
"""
