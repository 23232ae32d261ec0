"""Runs: who owns them, in what order their commands execute, what survives a restart."""
