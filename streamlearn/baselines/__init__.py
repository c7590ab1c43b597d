"""Presets with shared experts, as hooks of the learner: transient expert, CKA, consolidation, balance, stages."""
