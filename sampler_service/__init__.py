"""The sampler: serves a base model with many versions of adapters, and streams tokens."""
