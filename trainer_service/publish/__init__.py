"""Create versions, announce them to the watching samplers, and keep them as long as a sampler holds them."""
