"""The sampler's gRPC methods."""
