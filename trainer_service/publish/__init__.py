"""Versions: made here, announced to the samplers that watch, kept as long as one of them holds them."""
