"""Hostile calls."""
