"""Named, durable checkpoints on the checkpoint volume."""
