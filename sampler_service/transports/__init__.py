"""How versions reach a sampler."""
