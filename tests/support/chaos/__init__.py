"""Kills, power cuts and damage, and checks of what must hold after them."""
