"""Tinker's API, as its unmodified SDK 0.24 to 0.38 speaks it.

A session has models (runs here) and samplers (what is sampled from). Work is posted, and fetched as a future under the
id that the post answered with.
"""
