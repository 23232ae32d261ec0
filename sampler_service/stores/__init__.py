"""Stores for the weights that a sampler holds: adapters, a whole model, or one model updated in place."""
