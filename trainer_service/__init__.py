"""The trainer service: owns runs, checkpoints and versions, and holds gradients and optimizer state."""
