"""Reads single settings out of what a model's files say, and refuses what they cannot mean.

Knows no name of a setting, and no model.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from executor.model.errors import ModelError

MAX_INTEGER: Final = 2**31 - 1
"""No count or size of a model is larger: what is beyond it was damaged, or written by hand."""
_MAX_SHOWN_BITS: Final = 256
_MAX_SHOWN_CHARACTERS: Final = 300


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

    def integer(
        self, name: str, *, default: int | None = None, at_least: int = 1, at_most: int = MAX_INTEGER
    ) -> int:
        """The whole number from `at_least` to `at_most` under `name`.

        `default` (None: required) is taken when it is absent.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.wrong(name, f"a whole number of at least {at_least}")
        if value > at_most:
            raise self.wrong(name, f"at most {at_most}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """The finite number > 0 under `name`; `default` (None: required) when it is absent."""
        value = self._value(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
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
        return ModelError(f"{self.source}: {self.prefix}{name} is {self._shown(name)}; it must be {right}.")

    def refused(self, name: str, supported: str) -> ModelError:
        """The refusal of a value under `name` that means something which is not served."""
        return ModelError(
            f"{self.source}: {self.prefix}{name} {self._shown(name)} is not supported; "
            f"supported: {supported}."
        )

    def _shown(self, name: str) -> str:
        """The value as Python writes it; of a long one the beginning."""
        value = self.get(name)
        # Python refuses to write out a number of thousands of digits.
        if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
            return f"a number of {value.bit_length()} bits"
        shown = repr(value)
        return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else f"{shown[:_MAX_SHOWN_CHARACTERS]}…"

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {self.prefix}{name} is missing.")
        return value
