"""Tinker's API, as its unmodified SDK 0.24 to 0.38 uses it.

A session has models (runs here) and samplers (weights to sample from). Work is posted, and its result is fetched as a
future under the id that the post returned.
"""
