"""Limits on disk space and memory, in total and per tenant."""
