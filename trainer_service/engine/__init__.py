"""The training step: base model, adapters, losses, optimizers. Imports torch, never grpc."""
