"""Bringing runs back after the engine or the service died."""
