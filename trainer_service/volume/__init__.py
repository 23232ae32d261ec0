"""Files of the checkpoint volume that carry their format and a checksum."""
