"""What every command can say of its arguments."""


class UsageError(Exception):
    """The arguments ask for nothing that can be done."""
