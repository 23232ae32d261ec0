"""The engine's runs, in memory and in files."""
