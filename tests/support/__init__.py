"""Code shared by tests and benches."""
