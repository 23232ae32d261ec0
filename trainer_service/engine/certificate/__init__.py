"""The check that a base model computes what stock transformers computes."""
