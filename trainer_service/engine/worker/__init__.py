"""The engine's own process: its loop and its end of the pipe."""
