"""The engine process: base model, adapters, losses, optimizers. Imports torch, never grpc."""
