"""The part of an answer that must not depend on what happened to the trainer."""

import hashlib

# A time is written with as many digits as it needs, so a checkpoint's size depends on the time.
VOLATILE = {
    "milliseconds",
    "stage_milliseconds",
    "total_milliseconds",
    "create_time",
    "expire_time",
    "size_bytes",
    "blake3",
    "sha256",
    "path",
}


def stable(message) -> str:
    """Return the part that must be the same in a run without faults."""
    fields = []
    for descriptor, value in message.ListFields():
        if descriptor.name == "run":  # what else it says depends on the commands in flight
            fields.append(f"step={value.step}")
        elif descriptor.name not in VOLATILE:
            fields.append(f"{descriptor.name}={stable(value) if hasattr(value, 'ListFields') else _hashable(value)}")
    return f"{type(message).__name__}({', '.join(fields)})"


def _hashable(value):
    if hasattr(value, "items"):
        return sorted((key, str(item)) for key, item in value.items())
    if hasattr(value, "append"):
        return [hashlib.sha256(item.SerializeToString(deterministic=True)).hexdigest() for item in value]
    return "run" if str(value).startswith("run-") else value
