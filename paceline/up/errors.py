"""The error of `paceline up`."""


class CannotStart(Exception):
    """The services could not be started, or one was given up. The message is one sentence: why, and what to do."""
