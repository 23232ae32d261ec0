"""What callers send: bodies, pages of lists, metadata, and how many bytes of it wait."""
