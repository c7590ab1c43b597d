"""Changes to the learner at a shift: routing biases of the new regime, importance and anchors of the old one."""
