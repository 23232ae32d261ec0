"""The trainer's gRPC methods."""
