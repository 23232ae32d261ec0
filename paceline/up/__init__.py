"""`paceline up`: runs and supervises the three services on one machine, each on its own cores or GPUs."""
