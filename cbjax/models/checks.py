"""Checks that configurations make of their own values."""


def require(holds: bool, name: str, value: object, rule: str) -> None:
    """Raises ValueError that names the value and its rule unless it holds."""
    if not holds:
        raise ValueError(f"{name} {rule}. Got {value!r}.")


def require_positive_int(config: object, name: str) -> None:
    """Raises TypeError unless the attribute `name` is an int, ValueError unless it is positive."""
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int. Got {value!r}.")
    require(value > 0, name, value, "must be positive")
