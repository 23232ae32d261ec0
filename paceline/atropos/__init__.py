"""`paceline atropos`: trains a run from what the environments of an Atropos API server score.

environments ── sample ──► gateway (HTTP)      run-api ── batches ──► this ── commands ──► gateway (gRPC)
"""
