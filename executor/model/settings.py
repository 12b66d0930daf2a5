"""Reads single settings out of what a model's files say, and refuses what they cannot mean.

Knows no name of a setting, and no model.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.model.errors import ModelError


@dataclass(frozen=True, slots=True)
class Settings:
    """Named values out of one place. All methods raise `ModelError`, which names place, value and limit.

    A value that is null counts as absent.
    """

    values: Mapping[str, Any]
    source: str
    """The place, for people."""
    prefix: str = ""
    """What all names asked for begin with in `values`."""

    def get(self, name: str) -> Any:
        """The value under `name`, whatever it is."""
        return self.values.get(self.prefix + name)

    def integer(self, name: str, *, default: int | None = None, at_least: int = 1) -> int:
        """The whole number >= `at_least` under `name`; `default` (None: required) when it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(name, f"a whole number of at least {at_least}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """The finite number > 0 under `name`; `default` (None: required) when it is absent."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a finite number above 0")
        return float(value)

    def optional_number(self, name: str, *, absent: float | None = None) -> float | None:
        """The finite number > 0 under `name`; None when it is null, `absent` when it is not there."""
        if self.get(name) is not None:
            return self.number(name)
        return None if self.prefix + name in self.values else absent

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """The switch under `name`; `default` when it is absent."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def table(self, name: str) -> "Settings":
        """The settings under `name`; none when it is absent."""
        value = self._value(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object or null")
        return Settings(value, f"{self.source}: {self.prefix}{name}")

    def wrong(self, name: str, right: str) -> ModelError:
        """The refusal of the value under `name`, which should be `right`."""
        return ModelError(f"{self.source}: {self.prefix}{name} is {self.get(name)!r}; it must be {right}.")

    def refused(self, name: str, supported: str) -> ModelError:
        """The refusal of a value under `name` that means something which is not served."""
        return ModelError(
            f"{self.source}: {self.prefix}{name} {self.get(name)!r} is not supported; supported: {supported}."
        )

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {self.prefix}{name} is missing.")
        return value
