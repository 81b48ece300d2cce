"""Feature flags in a subset of flagd's format: variants, and rules of JsonLogic that select one for a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from argosy.policy.traffic.sticky_hash import hash_point
from argosy.settings import ByOperator

FlagName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)", examples=["new-filter"])
]
VariantName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$(?!\n)", examples=["on"])
]
FlagCondition = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}(=[A-Za-z0-9][A-Za-z0-9._-]{0,39})?$(?!\n)",
        examples=["new-filter", "new-filter=strict"],
    ),
]
"""Name of a flag whose variant must be `true`, or name and variant."""
FlagState = Literal["ENABLED", "DISABLED"]
FLAG_VARIABLES = (
    *("organisation", "project", "organisation_id", "project_id"),
    *("user", "key", "tier", "targetingKey"),
)
"""Variables of a request that the rules of a flag may read."""
MAX_OPERATIONS = 200
"""Maximum number of operations and values in the rules of a flag."""
MAX_DEPTH = 20


class FeatureFlag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A choice between variants, which conditions of rules read."""

    state: ByOperator[FlagState] = "ENABLED"
    """`DISABLED` selects the default variant for all requests."""
    variants: ByOperator[
        Annotated[dict[VariantName, bool | int | float | str], Meta(min_length=1, max_length=20)]
    ]
    """Values by the names of the variants."""
    default_variant: ByOperator[VariantName] = msgspec.field(name="defaultVariant")
    """Variant of requests for which the rules select none."""
    targeting: ByOperator[dict[str, Any]] = msgspec.field(default_factory=dict)
    """Rules in JsonLogic. Their result is the name of a variant. Operations: `if`, `==`, `!=`, `in`, `and`, `or`, `!`,
    `var`, `cat`, `starts_with`, `ends_with` and `fractional`."""


class FlagDecision(NamedTuple):
    """Variant of a flag for a request."""

    variant: str
    reason: str
    """`targeting`, `default` or `disabled`."""


class FlagError(ValueError):
    """Raised for a flag that cannot be evaluated. The message says what to change."""


class FlagRules:
    """Flag that is checked and can be evaluated. Immutable.

    Raises:
        FlagError: The flag names a variant that it does not have, or its rules have an unknown operation, are too large
            or malformed.
    """

    def __init__(self, name: str, flag: FeatureFlag) -> None:
        self.name = name
        self.flag = flag
        self._check_variants([flag.default_variant])
        if flag.targeting:
            operations = list(_list_operations(flag.targeting))
            for operator, arguments in operations:
                _check_operation(operator, arguments)
                if operator == "fractional":
                    self._check_variants([each for each, _ in _read_shares(arguments)])
            self._check_variants(_list_results(flag.targeting))

    def _check_variants(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.flag.variants:
                known = ", ".join(self.flag.variants)
                raise FlagError(f"there is no variant {name[:40]!r}. Use one of {known}.")

    @property
    def is_boolean(self) -> bool:
        """Whether a condition may name the flag without a variant."""
        return all(isinstance(value, bool) for value in self.flag.variants.values())

    def select(self, request: Mapping[str, str]) -> FlagDecision:
        """Select the variant of a request.

        Args:
            request: Values of `FLAG_VARIABLES`, empty if unknown. `fractional` divides by `targetingKey`.
        """
        flag = self.flag
        if flag.state == "DISABLED":
            return FlagDecision(flag.default_variant, "disabled")
        if flag.targeting:
            result = self._evaluate(flag.targeting, request)
            if isinstance(result, str) and result in flag.variants:
                return FlagDecision(result, "targeting")
        return FlagDecision(flag.default_variant, "default")

    def is_on(self, variant: str) -> bool:
        """Return whether the value of a variant is `true`."""
        return self.flag.variants[variant] is True

    def _evaluate(self, rule: Any, request: Mapping[str, str]) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(rule, list):
            return [self._evaluate(each, request) for each in rule]
        if not isinstance(rule, dict):
            return rule
        ((operator, arguments),) = rule.items()
        arguments = _to_list(arguments)
        if operator == "fractional":
            return self._divide(arguments, request)
        if operator == "if":
            *branches, last = arguments if len(arguments) % 2 else [*arguments, None]
            for condition, result in zip(branches[::2], branches[1::2], strict=True):
                if self._evaluate(condition, request):
                    return self._evaluate(result, request)
            return self._evaluate(last, request)
        if operator in {"and", "or"}:
            wanted = operator == "or"
            return (
                any(bool(self._evaluate(each, request)) == wanted for each in arguments) == wanted
            )
        values = [self._evaluate(each, request) for each in arguments]
        if operator == "var":
            return request.get(values[0], "")
        return _OPERATIONS[operator](*values)

    def _divide(self, arguments: list[Any], request: Mapping[str, str]) -> str | None:
        """Return the variant whose share contains the request's key; None without a key."""
        key: Any = request["targetingKey"]
        if not isinstance(arguments[0], list):
            key = self._evaluate(arguments[0], request)
        shares = _read_shares(arguments)
        point = hash_point(self.name, str(key)) * sum(weight for _, weight in shares)
        for variant, weight in shares if key else ():
            point -= weight
            if point < 0.0:
                return variant
        return None


def _is_in(part: Any, whole: Any) -> bool:  # noqa: ANN401 - any JSON
    return part in whole if isinstance(whole, list | str) and isinstance(part, str) else False


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "==": lambda left, right: left == right,
    "!=": lambda left, right: left != right,
    "in": _is_in,
    "!": lambda value: not value,
    "cat": lambda *values: "".join(map(str, values)),
    "starts_with": lambda text, part: str(text).startswith(str(part)),
    "ends_with": lambda text, part: str(text).endswith(str(part)),
}
_ARITIES = {"==": 2, "!=": 2, "in": 2, "!": 1, "starts_with": 2, "ends_with": 2, "var": 1}
_KNOWN_OPERATIONS = (*_OPERATIONS, "var", "if", "and", "or", "fractional")


def _to_list(arguments: Any) -> list[Any]:  # noqa: ANN401 - any JSON
    return arguments if isinstance(arguments, list) else [arguments]


def _list_operations(rule: Any) -> Iterator[tuple[str, list[Any]]]:  # noqa: ANN401 - any JSON
    """Yield the operations of rules with their arguments. Raises FlagError if they are too large or malformed."""
    stack: list[tuple[Any, int]] = [(rule, 0)]
    count = 0
    while stack:
        part, depth = stack.pop()
        count += 1
        if count > MAX_OPERATIONS or depth > MAX_DEPTH:
            raise FlagError(
                f"targeting has more than {MAX_OPERATIONS} values, or {MAX_DEPTH} nested ones. Make it simpler."
            )
        if isinstance(part, list):
            stack += [(each, depth + 1) for each in part]
        elif isinstance(part, dict):
            if len(part) != 1:
                raise FlagError("targeting: an operation is a mapping with one key. Nest several.")
            ((operator, arguments),) = part.items()
            yield operator, _to_list(arguments)
            stack.append((arguments, depth + 1))


def _check_operation(operator: str, arguments: list[Any]) -> None:
    if operator not in _KNOWN_OPERATIONS:
        known = ", ".join(_KNOWN_OPERATIONS)
        raise FlagError(f"targeting: {operator[:40]!r} is unknown. Use one of {known}.")
    if len(arguments) != _ARITIES.get(operator, len(arguments)) or not arguments:
        raise FlagError(f"targeting: {operator!r} has another number of arguments.")
    if operator == "var" and arguments[0] not in FLAG_VARIABLES:
        raise FlagError(
            f"targeting: there is no variable {str(arguments[0])[:40]!r}. Use one of {', '.join(FLAG_VARIABLES)}."
        )


def _read_shares(arguments: list[Any]) -> list[tuple[str, float]]:
    """Return the variants of `fractional` with their weights. Raises FlagError if they are malformed."""
    shares = []
    for each in arguments if isinstance(arguments[0], list) else arguments[1:]:
        match each:
            case [str(name)]:
                shares.append((name, 1.0))
            case [str(name), int() | float() as weight] if (
                not isinstance(weight, bool) and 0 <= weight <= 1e6
            ):
                shares.append((name, float(weight)))
            case _:
                raise FlagError(
                    "targeting: `fractional` has pairs of a variant and a weight from 0 to a million."
                )
    if not sum(weight for _, weight in shares):
        raise FlagError("targeting: `fractional` needs a weight above 0.")
    return shares


def _list_results(rule: Any) -> list[str]:  # noqa: ANN401 - any JSON
    """Return the names of variants that are results of rules, apart from those of `fractional`."""
    if isinstance(rule, str):
        return [rule]
    if isinstance(rule, dict) and "if" in rule:
        branches = _to_list(rule["if"])
        results = branches[1::2] + (branches[-1:] if len(branches) % 2 else [])
        return [name for result in results for name in _list_results(result)]
    return []
