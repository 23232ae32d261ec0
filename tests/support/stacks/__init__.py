"""Services and parts of them, assembled for tests."""
