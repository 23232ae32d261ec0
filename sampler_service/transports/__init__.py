"""Bridges, by which versions reach a sampler."""
