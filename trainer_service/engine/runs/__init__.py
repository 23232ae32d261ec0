"""What the engine holds of each run, in memory and in files."""
