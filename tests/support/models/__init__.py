"""Tiny models, and what is computed with them."""
