"""The trainer: holds gradients and optimizer state, owns runs, checkpoints and versions."""
