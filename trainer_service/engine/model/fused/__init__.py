"""Layers of a frozen decoder with hand-written backward passes: few passes over memory, no autocast."""
