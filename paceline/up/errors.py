"""What keeps `paceline up` from running."""


class CannotStart(Exception):
    """The services were not started, or gave up. The message is one sentence that says why and what to do."""
