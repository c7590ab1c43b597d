"""Variants of the daemon that no setting can produce, for ablations."""

from streamlearn.runtime.components import Components


def plain_adamw(components: Components) -> None:
    """Update every expert in every step: momentum and weight decay also move experts that received no token."""
    for group in components.learner.optimizer.groups:
        group.load_HK = None
