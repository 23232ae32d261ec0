"""The startup check that the engine computes what stock transformers computes."""
