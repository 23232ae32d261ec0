"""The engine process as the service sees it."""
