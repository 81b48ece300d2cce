"""Golden sets: requests with the assertions that their answers are graded by."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

MAX_SET_BYTES = 4 << 20
"""Maximum size of a golden set as JSON, and of a file that one is imported from."""
MAX_ITEMS = 5000
MAX_ASSERTIONS = 32
MAX_TEXT = 100_000
MAX_LABELS = 5000
PARAMETERS = frozenset(
    {
        *("temperature", "top_p", "seed", "stop", "max_tokens", "max_completion_tokens"),
        *("presence_penalty", "frequency_penalty", "response_format", "tools", "tool_choice"),
        *("reasoning_effort", "chat_template_kwargs", "top_k", "min_p"),
    }
)
"""Fields of a request that a set and its items may have."""

AssertionType = Literal[
    "equals",
    "contains",
    "icontains",
    "contains-any",
    "icontains-any",
    "contains-all",
    "icontains-all",
    "starts-with",
    "regex",
    "is-json",
    "contains-json",
    "is-refusal",
    "is-valid-openai-tools-call",
    "latency",
    "llm-rubric",
]
ASSERTION_TYPES = frozenset[str](get_args(AssertionType))
_LIST_TYPES = frozenset({"contains-any", "icontains-any", "contains-all", "icontains-all"})
_TEXT_TYPES = frozenset({"contains", "icontains", "equals", "starts-with", "regex", "llm-rubric"})
_SCHEMA_TYPES = frozenset({"is-json", "contains-json"})
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Score = Annotated[float, Meta(ge=0, le=1)]


class Assertion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Condition for an answer.

    Raises:
        ValueError: The value does not suit the type.
    """

    type: AssertionType
    is_negated: bool = False
    """Whether the answer must not meet it."""
    value: Any = None
    """Text, list of texts, JSON schema or rubric, as the type needs."""
    threshold: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    """Longest time in milliseconds for `latency`, or smallest passing score of a rubric."""
    weight: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    metric: Annotated[str, Meta(max_length=200)] = ""

    def __post_init__(self) -> None:
        if self.type in _TEXT_TYPES and not isinstance(self.value, str):
            raise ValueError(f"{self.type} needs a text as its value")
        if self.type in _LIST_TYPES and not (
            isinstance(self.value, list)
            and self.value
            and all(isinstance(each, str) for each in self.value)
        ):
            raise ValueError(f"{self.type} needs a list of texts as its value")
        if self.type in _SCHEMA_TYPES and not isinstance(self.value, dict | bool | None):
            raise ValueError(f"{self.type} needs a JSON schema or no value")
        if self.type == "latency" and self.threshold is None:
            raise ValueError("latency needs a threshold in milliseconds")
        if self.type == "regex":
            compile_pattern(self.value)

    @property
    def name(self) -> str:
        """Type as promptfoo writes it, such as `not-contains`."""
        return f"not-{self.type}" if self.is_negated else self.type


class GoldenItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request, and what its answer is graded by."""

    id: Name
    """Unique in the set."""
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=200)]
    assertions: Annotated[tuple[Assertion, ...], Meta(min_length=1, max_length=MAX_ASSERTIONS)]
    cluster: Annotated[str, Meta(max_length=200)] = ""
    """Items with the same cluster, such as questions about one document, count once. Empty for none."""
    parameters: dict[str, Any] = {}
    """Fields of the request beside those of the set."""


class JudgeLabel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score that a person gave an answer, by which the judge is calibrated."""

    rubric: Text
    input: Text
    output: Text
    score: Score


class GoldenSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests with assertions, and what they share. All of it is part of the digest.

    Raises:
        ValueError: An id occurs twice, or a parameter is unknown.
    """

    items: Annotated[tuple[GoldenItem, ...], Meta(min_length=1, max_length=MAX_ITEMS)]
    parameters: dict[str, Any] = {}
    """Fields of every request, such as `max_tokens`. The default temperature is 0, and the default seed 0."""
    judge: Annotated[str, Meta(max_length=200)] = ""
    """Model that grades by rubrics. Empty for none."""
    labels: Annotated[tuple[JudgeLabel, ...], Meta(max_length=MAX_LABELS)] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for parameters in (self.parameters, *(item.parameters for item in self.items)):
            unknown = sorted(parameters.keys() - PARAMETERS)
            if unknown:
                raise ValueError(
                    f"the parameter {unknown[0][:100]!r} is not known; use {', '.join(sorted(PARAMETERS))}"
                )
        for item in self.items:
            if item.id in seen:
                raise ValueError(f"the item {item.id!r} occurs twice; give each its own id")
            seen.add(item.id)

    @property
    def has_rubrics(self) -> bool:
        """Whether a judge is needed."""
        return any(each.type == "llm-rubric" for item in self.items for each in item.assertions)

    def encode(self) -> bytes:
        """Return the set as JSON, always the same bytes.

        Raises:
            ValueError: It is too large.
        """
        encoded = msgspec.json.encode(self, order="sorted")
        if len(encoded) > MAX_SET_BYTES:
            raise ValueError(
                f"the set has {len(encoded):,} bytes, more than {MAX_SET_BYTES:,}; split it"
            )
        return encoded

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded set, as hexadecimal digits."""
        return hashlib.sha256(self.encode()).hexdigest()


def decode_set(encoded: bytes) -> GoldenSet:
    """Return an encoded set. Raises ValueError if it is none."""
    return msgspec.json.decode(encoded, type=GoldenSet)


def compile_pattern(pattern: str) -> Any:  # noqa: ANN401 - the library has no types
    """Return a regular expression in RE2's syntax. Raises ValueError if it is invalid."""
    import re2

    options = re2.Options()
    options.log_errors = False  # it would write to stderr
    options.max_mem = 1 << 20
    try:
        return re2.compile(pattern, options=options)
    except re2.error as error:
        reason = error.args[0]
        reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
        raise ValueError(
            f"the regular expression {pattern[:100]!r} is invalid in RE2's syntax: {reason}"
        ) from None
