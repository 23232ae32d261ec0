"""What runs in vLLM's worker processes."""
