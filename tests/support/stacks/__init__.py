"""Services and parts of them, put together for tests."""
