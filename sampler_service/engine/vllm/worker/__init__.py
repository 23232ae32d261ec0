"""Code that runs in vLLM's worker processes."""
