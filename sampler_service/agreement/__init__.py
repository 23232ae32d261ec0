"""Comparison of this sampler's log-probabilities with its trainer's."""
