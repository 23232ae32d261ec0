"""HTTP APIs for existing clients. Each is translated to the same gRPC contracts and has no logic of its own."""
