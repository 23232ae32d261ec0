"""The optimizers: one file for each algorithm."""
