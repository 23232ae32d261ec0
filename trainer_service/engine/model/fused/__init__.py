"""Layers of a frozen decoder with their backward passes written out: few passes over memory, no autocast."""
