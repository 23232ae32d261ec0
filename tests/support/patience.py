"""How long tests wait for what must happen."""

PATIENCE = 300.0
"""Seconds; long enough that only what never happens is late, even on a busy machine."""
