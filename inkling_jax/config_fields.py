"""Typed, bounded reading of one JSON object: every refusal names the file, the field, its value and what would be right."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inkling_jax.errors import CheckpointError, ConfigError

MAX_SIZE = 2**31  # beyond any real width; keeps a hostile file from reaching an allocation
MAX_LAYERS = 4096  # a flag a layer is built before any tensor can contradict the count
TINY = 2.0**-126  # the least normal float32: a smaller divisor or epsilon is zero where it is used


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in the file `path`. Raises CheckpointError for a missing, unreadable, invalid or non-object file."""
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path}: not a regular file; expected a JSON object")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); expected a JSON object") from error
    except (ValueError, RecursionError) as error:  # ValueError: bad JSON, bad UTF-8, an integer of thousands of digits
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class Fields:
    """One object of a configuration file. A field may have several spellings, the first present one counts; null is absent."""

    def __init__(self, values: Mapping[str, Any], source: str, path: str = "") -> None:
        self.values = values
        self.source = source
        self.path = path

    def error(self, name: str, expected: str) -> ConfigError:
        """What to raise when field `name` is not `expected`."""
        return ConfigError(f"{self.source}: {self.path}{name} is {reprlib.repr(self.values.get(name))}, expected {expected}")

    def missing(self, *names: str, hint: str = "") -> ConfigError:
        """What to raise when none of the spellings `names` is there."""
        others = f" (also spelled {', '.join(names[1:])})" if names[1:] else ""
        return ConfigError(f"{self.source}: {self.path}{names[0]}{others} is missing{hint}")

    def present(self, *names: str) -> str | None:
        """The first of the spellings `names` that has a value."""
        return next((name for name in names if self.values.get(name) is not None), None)

    def _default[T](self, names: tuple[str, ...], default: T | None) -> T:
        """`default`, for an absent field that has one."""
        if default is None:
            raise self.missing(*names)
        return default

    def section(self, name: str) -> Fields | None:
        """The object in field `name`, or None where absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, "an object")
        return Fields(value, self.source, f"{self.path}{name}.")

    def integer(self, *names: str, low: int = 1, high: int = MAX_SIZE, limit: str = "", default: int | None = None) -> int:
        """An integer from `low` to `high`; `limit` says in the message where `high` comes from."""
        name = self.present(*names)
        if name is None:
            return self._default(names, default)
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}{limit and f' ({limit})'}")
        return value

    def number(self, *names: str, low: float = TINY, default: float | None = None) -> float:
        """A finite number from `low` to 2**31."""
        name = self.present(*names)
        if name is None:
            return self._default(names, default)
        value = self.values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= MAX_SIZE:  # false for NaN
            raise self.error(name, f"a finite number {'above 0' if low == TINY else f'from {low} to {MAX_SIZE}'}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def require(self, name: str, value: Any) -> None:
        """Refuse another value than `value`, the only supported one, where the field is present."""
        found = self.values.get(name)
        if found is not None and (found != value or isinstance(found, bool) != isinstance(value, bool)):
            raise self.error(name, f"{json.dumps(value)} (nothing else is supported)")

    def kinds(self, name: str, count: int, kinds: Mapping[str, bool]) -> tuple[bool, ...] | None:
        """A list of `count` names, each looked up in `kinds`; None where absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != count:
            found = f", found {len(value)}" if isinstance(value, (list, tuple)) else ""
            raise self.error(name, f"a list of {count} kinds, one a layer{found}")
        for index, kind in enumerate(value):
            if not isinstance(kind, str) or kind not in kinds:
                known = ", ".join(kinds)
                raise ConfigError(f"{self.source}: {self.path}{name}[{index}] is {reprlib.repr(kind)}, expected one of {known}")
        return tuple(kinds[kind] for kind in value)

    def marked(self, count: int, *names: str) -> tuple[bool, ...] | None:
        """A list of distinct indices below `count`, as one flag an index; None where absent."""
        name = self.present(*names)
        if name is None:
            return None
        flags = [False] * count
        for index in self.integers(name, count, "the number of layers"):
            if flags[index]:
                raise ConfigError(f"{self.source}: {self.path}{name} has {index} more than once, expected distinct indices")
            flags[index] = True
        return tuple(flags)

    def integers(self, name: str, count: int, limit: str) -> tuple[int, ...]:
        """A list of integers from 0 to below `count`; `limit` says in the message what `count` is."""
        value = self.values[name]
        if not isinstance(value, (list, tuple)):
            raise self.error(name, "a list of integers")
        for index, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < count:
                where = f"{self.source}: {self.path}{name}[{index}] is {reprlib.repr(item)}"
                raise ConfigError(f"{where}, expected an integer from 0 to {count - 1} (below {limit}, {count})")
        return tuple(value)
