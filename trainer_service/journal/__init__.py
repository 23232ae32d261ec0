"""A run's journal: each command is on the volume before it is executed, so that a killed process loses none."""
