"""The engine over transformers and PEFT."""
