"""Which requests are admitted, and whose turn it is."""
