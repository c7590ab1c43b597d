"""What a shift changes in the learner: experts are claimed or favoured, what was learned is held in place."""
