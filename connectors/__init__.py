"""Where records come from and where unusable ones go: one module a system, all behind `streamlearn.stream.source`."""
