"""Typed access to a checkpoint's config.json and generation_config.json, with errors that name file and key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_INTEGER = 2**31 - 1
"""Largest accepted integer. No size of a model comes near it."""
MAX_LAYERS = 1024
"""Largest accepted number of layers. Larger numbers are mistakes, and would take hours to build."""
MAX_WIDTH = 1 << 24
"""Largest accepted width of a layer."""
MAX_HEADS = 1 << 16
"""Largest accepted number of heads of a layer, and of elements of a head."""
MAX_QUOTED_CHARS = 80
"""Maximum number of characters of a value that an error message quotes."""


def read_json(path: Path) -> dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        ValueError: The file cannot be read or does not contain a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold a JSON object; fetch the model again")  # noqa: TRY004
    return value


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Values of a config.json, with the defaults of its model family. Typed methods treat null as absent.

    Every typed method raises a `ValueError` that names the file and the key if the value has another type.
    """

    path: Path
    values: Mapping[str, object]
    defaults: Mapping[str, object]

    def get(self, key: str) -> object:
        """Return the value, the default, or None. An explicit null overrides the default."""
        return self.values[key] if key in self.values else self.defaults.get(key)

    def section(self, key: str) -> dict[str, object]:
        """Return an object, empty if absent."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return dict(value)

    def integer(self, key: str, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Return a required integer from `minimum` to `maximum`."""
        value = self.optional_integer(key, minimum, maximum)
        if value is None:
            raise self.error(key, f"a whole number from {minimum} to {maximum}")
        return value

    def optional_integer(
        self, key: str, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int | None:
        """Return an integer from `minimum` to `maximum`, or None if absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "a whole number")
        if not minimum <= value <= maximum:
            raise self.error(key, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, minimum: float = 0.0, *, exclusive: bool = True) -> float:
        """Return a required finite number above `minimum`, or from `minimum` on if it is not exclusive."""
        value = self.optional_number(key, minimum, exclusive=exclusive)
        if value is None:
            raise self.error(key, "a number")
        return value

    def optional_number(
        self, key: str, minimum: float = 0.0, *, exclusive: bool = True
    ) -> float | None:
        """Return a finite number above `minimum` (from it on, if not exclusive), or None if absent."""
        value = self.get(key)
        if value is None:
            return None
        number = _to_finite(value)
        if number is None:
            raise self.error(key, "a finite number")
        if number < minimum or (exclusive and number == minimum):
            bound = f"above {minimum:g}" if exclusive else f"of at least {minimum:g}"
            raise self.error(key, f"a number {bound}")
        return number

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers, empty if absent."""
        value = self.get(key)
        items = [] if value is None else value
        numbers = [_to_finite(item) for item in items] if isinstance(items, list) else [None]
        finite = tuple(number for number in numbers if number is not None)
        if len(finite) < len(numbers):
            raise self.error(key, "a list of finite numbers")
        return finite

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty if absent."""
        value = self.get(key)
        items = [] if value is None else value
        if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
            raise self.error(key, "a list of strings")
        return tuple(items)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple, empty if absent."""
        value = self.get(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size
            for item in items
        ):
            raise self.error(
                key, f"a token id or a list of them, each below the vocab_size {vocab_size}"
            )
        return tuple(items)

    def string(self, key: str) -> str | None:
        """Return a string, or None if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def flag(self, key: str) -> bool:
        """Return a boolean, False if absent."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "true or false")
        return bool(value)

    def with_values(self, values: Mapping[str, object]) -> CheckpointConfig:
        """Return a view of the same file with the values of one of its sections, without defaults."""
        return CheckpointConfig(self.path, values, {})

    def error(self, key: str, expected: str) -> ValueError:
        """Build the error for a missing or invalid value."""
        value = repr(self.get(key))
        found = "is missing" if self.get(key) is None else f"is {value[:MAX_QUOTED_CHARS]}"
        return ValueError(f"{self.path}: {key} {found}; it must be {expected}")


def _to_finite(value: object) -> float | None:
    """Return the value as a float, or None if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number if math.isfinite(number) else None


GENERATION_CONFIG_FILE = "generation_config.json"
AUTO_CONFIG = "auto"
NO_CONFIG = "none"
_NO_CONFIG_NAMES = frozenset({NO_CONFIG, "vllm"})
"""Names for the neutral defaults. The second one is vLLM's."""


def read_generation_config(path: Path, source: str = AUTO_CONFIG) -> CheckpointConfig:
    """Read the generation config that `source` selects, which is empty if the checkpoint has none.

    Args:
        path: Directory of the checkpoint.
        source: `auto` or `none` for the checkpoint's own file, or another folder with such a file.

    Raises:
        ValueError: The file is no JSON object, or the folder has none.
    """
    if source == AUTO_CONFIG or source in _NO_CONFIG_NAMES:
        file = path / GENERATION_CONFIG_FILE
        return CheckpointConfig(file, read_json(file) if file.is_file() else {}, {})
    file = Path(source).expanduser() / GENERATION_CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"--generation-config is {source!r}, but there is no {file}; use auto, none, or a folder with this file"
        )
    return CheckpointConfig(file, read_json(file), {})


def applies_sampling_defaults(source: str) -> bool:
    """Return whether requests get the defaults of the generation config. Its end-of-sequence ids always apply."""
    return source not in _NO_CONFIG_NAMES
