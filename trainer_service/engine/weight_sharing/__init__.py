"""Base weights that a sampler holds (bridge `shared`)."""
