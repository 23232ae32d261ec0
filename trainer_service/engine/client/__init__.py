"""The service's side of the engine process."""
