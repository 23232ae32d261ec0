"""The sampler: holds a base model and many versions of adapters, and streams tokens."""
