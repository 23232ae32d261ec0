"""Versions on this sampler: how they arrive, which are loaded, when they go."""
