"""The page of the HTTP port: its files, and the JSON that it reads."""
