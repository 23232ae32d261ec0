"""Sampling requests and replies: decoding, validation, encoding."""
