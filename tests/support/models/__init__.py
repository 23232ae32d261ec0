"""Tiny models and computations with them."""
