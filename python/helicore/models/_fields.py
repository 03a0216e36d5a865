"""Typed access to a parsed JSON object, with errors that name the file and the field."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Fields:
    """A JSON object of `file`. A field that is absent or null counts as missing.

    Where a method takes several names, the later ones are aliases for the same field.
    """

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "") -> None:
        self._values = values
        self._file = file
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def error(self, name: str, expected: str) -> ValueError:
        value = repr(self._values[name]) if name in self._values else "nothing"
        return ValueError(f"{self._file}: {self._prefix}{name} must be {expected}, got {value}")

    def section(self, name: str) -> "Fields":
        """A nested object; empty when missing."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value or {}, self._file, f"{self._prefix}{name}.")

    def integer(
        self,
        *names: str,
        default: int | None = None,
        low: int | None = None,
        high: int | None = None,
        multiple: int = 1,
    ) -> int:
        name = self._pick(names)
        value = self._values.get(name)
        if value is None:
            return self._default(name, default, "an integer")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "an integer")
        if low is not None and value < low:
            raise self.error(name, f"at least {low}")
        if high is not None and value > high:
            raise self.error(name, f"at most {high}")
        if value % multiple:
            raise self.error(name, f"a multiple of {multiple}")
        return value

    def integers(self, name: str, *, low: int, high: int | None = None) -> tuple[int, ...]:
        """A list of integers in [low, high]."""
        bounds = f"[{low}, {high}]" if high is not None else f"[{low}, ...]"
        for item in self._values[name]:
            good = isinstance(item, int) and not isinstance(item, bool)
            if not good or item < low or (high is not None and item > high):
                raise self.error(name, f"integers in {bounds}")
        return tuple(self._values[name])

    def number(
        self, *names: str, default: float | None = None, above: float | None = None
    ) -> float:
        name = self._pick(names)
        value = self._values.get(name)
        if value is None:
            return self._default(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "a number")
        if not math.isfinite(value):
            raise self.error(name, "finite")
        if above is not None and value <= above:
            raise self.error(name, f"greater than {above:g}")
        return float(value)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        name = self._pick(names)
        value = self._values.get(name)
        if value is None:
            return self._default(name, default, "true or false")
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._values.get(name)
        if value is None:
            return self._default(name, default, "a string")
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def choice(self, name: str, allowed: Sequence[str], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self.error(name, "one of " + ", ".join(allowed))
        return value

    def _pick(self, names: Sequence[str]) -> str:
        return next((n for n in names if self.has(n)), names[0])

    def _default(self, name: str, default: T | None, expected: str) -> T:
        if default is None:
            raise self.error(name, expected)
        return default
