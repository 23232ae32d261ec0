"""What tests and benches share."""
