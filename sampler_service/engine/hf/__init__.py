"""The engine built on transformers and PEFT."""
