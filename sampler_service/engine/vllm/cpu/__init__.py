"""What vLLM needs on a CPU alone."""
