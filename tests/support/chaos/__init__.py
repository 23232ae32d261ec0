"""Kills, power cuts and damage, and what must hold after them."""
