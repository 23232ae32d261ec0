"""What is measured of each run: the trainer's rows, what clients log, and the files that keep both."""
