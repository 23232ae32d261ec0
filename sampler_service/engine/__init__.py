"""Engines that turn prompts into tokens. Import vllm or torch, never grpc."""
