"""gRPC as Paceline uses it: one way to serve, one way to call, one mapping of errors."""
