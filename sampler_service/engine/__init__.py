"""Engines that turn prompts into tokens. Modules here may import vllm or torch, never grpc."""
