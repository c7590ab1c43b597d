"""The probe of a new regime: which stable experts resemble it, and which weights are important to it."""
