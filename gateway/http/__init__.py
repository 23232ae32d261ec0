"""HTTP for clients that exist: each API is translated onto the same gRPC contracts, and has no logic of its own."""
