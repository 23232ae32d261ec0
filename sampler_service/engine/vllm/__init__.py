"""The engine built on vLLM."""
