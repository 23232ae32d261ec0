"""From a batch to microbatches, and their forward and backward passes."""
