"""`paceline atropos`: trains a run on sequences scored by the environments of an Atropos API server.

environments ── sample ──► gateway (HTTP)      run-api ── batches ──► this ── commands ──► gateway (gRPC)
"""
