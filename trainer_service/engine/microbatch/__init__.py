"""Microbatching: pack a batch, schedule its segments, and run their forward and backward passes."""
