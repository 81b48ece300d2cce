"""Rules for keywords about any value: `type`, `enum`, `const` and the numeric keywords."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from argosy.constraints.limits import (
    MAX_COUNT,
    MAX_ENUM_VALUES,
    MAX_EXACT_EXPONENT,
    MAX_EXACT_INTEGER,
    MAX_MULTIPLE,
    MAX_SCHEMA_DEPTH,
)
from argosy.constraints.schema_normalizer import SchemaNode

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
INEXACT = "it has a number beyond 2^53, with more than 15 digits or with more than 22 digits after the point"
CONTROL_CHARACTER = "it has a control character that answers write only as a Unicode escape"


def normalize_type(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Check the names of types."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or any(name not in TYPES for name in names):
        node.reject(f"The value must be one or several of {', '.join(TYPES)}.", keyword)
    unique = list(dict.fromkeys(names))
    if "number" in unique and "integer" in unique:
        unique.remove("integer")
    node.output[keyword] = unique[0] if len(unique) == 1 else unique


def normalize_enum(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Keep values that the library writes exactly."""
    if not isinstance(value, list) or not value:
        node.reject("The value must be a list with at least one item.", keyword)
    node.normalizer.count("enum values", len(value), MAX_ENUM_VALUES, node.pointer(keyword))
    values = _exact_values(node, keyword, value)
    if values is not None:
        node.output[keyword] = values


def normalize_const(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Keep a value that the library writes exactly."""
    values = _exact_values(node, keyword, [value])
    if values is not None:
        node.output[keyword] = values[0]


def _exact_values(node: SchemaNode, keyword: str, values: list[Any]) -> list[Any] | None:
    try:
        return [_exact_value(value, 0) for value in values]
    except ValueError as error:
        node.relax(keyword, str(error))
        return None


def _exact_value(value: Any, depth: int) -> Any:  # noqa: ANN401 - JSON value
    """Return a value with whole numbers as integers. Raises ValueError for one that cannot be written exactly."""
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"a value is nested more than {MAX_SCHEMA_DEPTH} deep")
    if isinstance(value, str):
        return _check_text(value)
    if isinstance(value, list):
        return [_exact_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_check_text(name): _exact_value(item, depth + 1) for name, item in value.items()}
    if value is None or isinstance(value, bool):
        return value
    if not is_exact(value):
        raise ValueError(INEXACT)
    return int(value) if value == int(value) else value


def _check_text(text: str) -> str:
    if any(character < " " and character not in "\b\t\n\f\r" for character in text):
        raise ValueError(CONTROL_CHARACTER)
    return text


def is_exact(number: float) -> bool:
    """Return whether the library treats a number exactly.

    It parses decimal digits and powers of ten exactly only if both are small.
    """
    if number == 0:
        return True
    if not abs(number) < MAX_EXACT_INTEGER:  # also NaN, and integers that no float can hold
        return False
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    return (
        isinstance(exponent, int)
        and abs(exponent) <= MAX_EXACT_EXPONENT
        and int("".join(map(str, digits))) < MAX_EXACT_INTEGER
    )


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def normalize_bound(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Keep a bound of numbers. A boolean of draft 4 makes the other bound exclusive."""
    if keyword.startswith("exclusive") and isinstance(value, bool):
        bound = node.source.get("minimum" if keyword == "exclusiveMinimum" else "maximum")
        if not value or bound is None:
            return
        value = bound
    if not is_number(value):
        node.reject("The value must be a number.", keyword)
    if is_exact(value):
        node.output[keyword] = value
    else:
        node.relax(keyword, INEXACT)


def normalize_multiple(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Keep a divisor with few digits."""
    if not is_number(value) or not value > 0:
        node.reject("The value must be a number above 0.", keyword)
    if not is_exact(value):
        node.relax(keyword, INEXACT)
        return
    coefficient = int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))
    if value >= 1 and value == int(value):
        coefficient = int(value)
    if coefficient > MAX_MULTIPLE:
        node.relax(keyword, f"the divisor has more than {MAX_MULTIPLE} steps")
    else:
        node.output[keyword] = value


def read_count(node: SchemaNode, keyword: str) -> int | None:
    """Return a non-negative integer of the source, or None if it is absent."""
    if keyword not in node.source:
        return None
    value = node.source[keyword]
    if not is_number(value) or value < 0 or value != value // 1:
        node.reject("The value must be an integer of at least 0.", keyword)
    return int(value)


def normalize_count(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401, ARG001 - signature of rules
    """Keep a bound of a length or of a number of items."""
    count = read_count(node, keyword)
    if count is not None and count > MAX_COUNT:
        node.relax(keyword, f"grammars count to {MAX_COUNT}")
    elif count is not None and (count or keyword.startswith("max")):
        node.output[keyword] = count


def finish_bounds(node: SchemaNode) -> None:
    """Replace exclusive bounds of numbers by the next number of 15 digits.

    A number such as 17.0000000000000000001 is above 17, and is 17 for a client that parses it as a double. Besides, the
    library allows 17 where only numbers above 17 and below 18 are valid.
    """
    if node.output.get("type") == "integer":
        return
    for exclusive, inclusive, direction in (
        ("exclusiveMinimum", "minimum", 1),
        ("exclusiveMaximum", "maximum", -1),
    ):
        if exclusive not in node.output:
            continue
        bound = _find_neighbour(node.output.pop(exclusive), direction)
        select = max if direction > 0 else min
        node.output[inclusive] = select(bound, node.output.get(inclusive, bound))


def _find_neighbour(number: float, direction: int) -> float:
    """Return the nearest number above or below that has 15 digits, at most 22 of them after the point."""
    exact = Decimal(str(number))
    exponent = max(exact.adjusted() - 14, -MAX_EXACT_EXPONENT) if number else -MAX_EXACT_EXPONENT
    return float(exact + direction * Decimal(1).scaleb(exponent))
