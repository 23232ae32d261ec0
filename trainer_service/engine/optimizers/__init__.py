"""The optimizers: their names and settings (specs), and one file for each algorithm."""
