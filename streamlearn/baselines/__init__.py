"""Presets with shared experts: transient expert, CKA routing bias and importance consolidation (CP-MoE)."""
