"""Runs: their owners, the order of their commands, and what survives a restart."""
