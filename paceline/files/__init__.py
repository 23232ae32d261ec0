"""Files that others may write to or must not read."""
