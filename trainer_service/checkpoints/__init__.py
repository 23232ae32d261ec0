"""Named, durable snapshots on the checkpoint volume."""
