"""MetaClaw's remote training API."""
