"""How long tests wait for what must come."""

PATIENCE = 300.0
"""Seconds: so many that only what never comes is late, also on a machine that does much else."""
