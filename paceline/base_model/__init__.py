"""The base model: its directory, its identity, and its weights lent on one machine."""
