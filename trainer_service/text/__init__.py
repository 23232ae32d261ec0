"""The base model's tokenizer and chat template."""
