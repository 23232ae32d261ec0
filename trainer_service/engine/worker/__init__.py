"""The engine process: its loop and its end of the pipe."""
