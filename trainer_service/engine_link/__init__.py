"""The link to the engine process: the end that the service holds, and what both ends agree on. Imports no torch."""
