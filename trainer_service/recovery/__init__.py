"""Recovery of runs after the engine or the service died."""
