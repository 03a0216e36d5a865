"""How values that a caller passed are checked and shown in error messages."""

from __future__ import annotations

import operator


def describe(value: object) -> str:
    """A value as error messages show it: its repr, shortened, and its type unless it is plain."""
    try:
        text = repr(value)
    except Exception:  # an integer too long to print, or an object whose repr is broken
        big = isinstance(value, int)
        return f"an integer of {value.bit_length()} bits" if big else f"a {type(value).__name__}"  # type: ignore[attr-defined]
    if len(text) > 80:
        text = text[:77] + "..."
    if value is None or isinstance(value, (bool, int, float, str)):
        return text
    return f"{text} ({type(value).__name__})"


def is_boolean(value: object) -> bool:
    """Of Python, numpy or torch: an integer to them, never to a user."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")


def check_integer(field: str, value: object, low: int, high: int, note: str = "") -> int:
    """`value` as an int in [low, high]; ValueError that starts with `field` where it is not one."""
    # numpy integers are welcome.
    try:
        if is_boolean(value):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{field} must be an integer, got {describe(value)}") from None
    if not low <= number <= high:
        raise ValueError(f"{field} must be in [{low}, {high}]{note}, got {describe(value)}")
    return number
