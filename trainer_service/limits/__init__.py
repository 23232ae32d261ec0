"""Room on the disk and in memory, and each tenant's part of it."""
