"""Base weights in a sampler's memory (bridge `shared`)."""
