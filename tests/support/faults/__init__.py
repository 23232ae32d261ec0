"""Faults between a client and the trainer, by plan, and what must hold of the client's commands."""
