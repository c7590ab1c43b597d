"""The frozen model: located, checked, loaded in a dtype that suits the machine, with attention over packed batches."""
