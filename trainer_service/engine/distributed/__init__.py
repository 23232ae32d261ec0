"""Several ranks: processes with a device each."""
