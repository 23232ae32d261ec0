"""The losses and their settings."""
