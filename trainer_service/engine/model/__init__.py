"""The frozen base model and its layers on packed sequences."""
