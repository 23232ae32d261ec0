"""Whether this sampler computes what its trainer computes."""
