"""The weights that a sampler holds: adapters, a whole model, or one model that is updated in place."""
