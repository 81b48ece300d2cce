"""Rules for parameters of requests that hold for every model: restricted parameters, numeric ranges and stop strings.

Replicas apply them to every request, and a gateway to requests that would have to wait for a replica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.protocol.errors import ApiError, invalid_request

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ParameterRestriction:
    """Predicate for the supported values of a parameter, and the reason for rejecting the others."""

    is_supported: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class NumericRange:
    """Closed interval, without the lower bound if `exclusive_minimum` is set."""

    minimum: float
    maximum: float
    exclusive_minimum: bool = False

    def __contains__(self, value: float) -> bool:
        return (
            self.minimum < value if self.exclusive_minimum else self.minimum <= value
        ) and value <= self.maximum

    def __str__(self) -> str:
        return f"{'above' if self.exclusive_minimum else 'at least'} {self.minimum} and at most {self.maximum}"


def _is_empty(value: object) -> bool:
    return not value


def _is_never_supported(value: object) -> bool:  # noqa: ARG001 - signature of the table's predicates
    return False


def _is_one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


RESTRICTED_PARAMETERS: dict[str, ParameterRestriction] = {
    # other kinds of input and output
    "audio": ParameterRestriction(_is_never_supported, "Audio is not supported."),
    "modalities": ParameterRestriction(_is_one_of(["text"]), 'Only ["text"] is supported.'),
    "documents": ParameterRestriction(
        _is_empty, "Documents are not supported. Put their text into a message."
    ),
    "suffix": ParameterRestriction(_is_empty, "This model cannot fill in the middle."),
    # style of the answer
    "chat_template": ParameterRestriction(
        _is_never_supported,
        "Templates from requests are not run. Start the server with --chat-template.",
    ),
    # sampling methods
    "use_beam_search": ParameterRestriction(_is_empty, "Beam search is not supported."),
    "length_penalty": ParameterRestriction(
        _is_one_of(1), "The parameter only applies to beam search, which is not supported."
    ),
    "bad_words": ParameterRestriction(_is_empty, "Bad words are not supported. Use logit_bias."),
    "logprob_token_ids": ParameterRestriction(
        _is_empty, "Selected log-probabilities are not supported. Use top_logprobs."
    ),
    "kv_transfer_params": ParameterRestriction(_is_empty, "KV transfer is not supported."),
    # service features
    "priority": ParameterRestriction(
        lambda value: 0 <= value <= 8,
        "A request may only lower its own priority. Use 0 (unchanged) to 8.",
    ),
}
"""Parameters that are rejected with an error, never ignored, if the server cannot apply them.

They constrain the output, change what the prompt means, or ask for another kind of output.
"""

IGNORED_PARAMETERS: dict[str, Callable[[Any], bool]] = {
    "store": _is_empty,  # no completions are stored
    "service_tier": _is_one_of("auto", "default"),
    "verbosity": _is_one_of("medium"),
    "web_search_options": _is_never_supported,
    "moderation": _is_never_supported,
    "stream_interval": _is_one_of(1),  # each token is sent as soon as it is generated
}
"""Parameters that are ignored and named in a response header, with a predicate of the values that need no action."""

PARAMETER_RANGES: dict[str, NumericRange] = {
    "temperature": NumericRange(0, 100),  # OpenAI refuses more than 2, vLLM does not
    "top_p": NumericRange(0, 1),
    "top_k": NumericRange(-1, MAX_TOKENS),
    "min_p": NumericRange(0, 1),
    "presence_penalty": NumericRange(-2, 2),
    "frequency_penalty": NumericRange(-2, 2),
    "repetition_penalty": NumericRange(0.01, 100),
    "n": NumericRange(1, MAX_CHOICES),
    "seed": NumericRange(INT64_MIN, INT64_MAX),
    "max_tokens": NumericRange(0, MAX_TOKENS),
    "max_completion_tokens": NumericRange(1, MAX_TOKENS),
    "min_tokens": NumericRange(0, MAX_TOKENS),
    "top_logprobs": NumericRange(0, MAX_LOGPROBS),
    "prompt_logprobs": NumericRange(0, MAX_LOGPROBS),
    "truncate_prompt_tokens": NumericRange(1, MAX_TOKENS),
}

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_TOTAL_STOP_BYTES = 8192


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Reject unsupported parameters and numbers out of range. None means not set.

    Raises:
        ApiError: 400 naming the parameter.
    """
    for name, restriction in RESTRICTED_PARAMETERS.items():
        value = parameters.get(name)
        if value is not None and not restriction.is_supported(value):
            raise unsupported_parameter(name, restriction.reason)
    for name, allowed_range in PARAMETER_RANGES.items():
        value = parameters.get(name)
        if value is not None:
            check_range(name, value, allowed_range)


def ignored_parameters(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the parameters that are set and have no effect here, although they ask for one."""
    return tuple(
        name
        for name, needs_no_action in IGNORED_PARAMETERS.items()
        if parameters.get(name) is not None and not needs_no_action(parameters[name])
    )


def check_range(name: str, value: float, allowed: NumericRange) -> None:
    """Raise `ApiError` (400) for a number outside `allowed`. NaN is outside every range."""
    if value not in allowed:
        raise invalid_request(f"'{name}' must be {allowed}, not {format_number(value)}.", name)


def unsupported_parameter(name: str, reason: str) -> ApiError:
    """Return the error for a parameter value that is not supported."""
    return invalid_request(
        f"'{name}' is not supported with this value. {reason}", name, "unsupported_parameter"
    )


def normalize_stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Validate stop strings. Returns them in the given order, without duplicates."""
    stop_strings = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop or []))
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise invalid_request(
            f"'stop' has {len(stop_strings)} strings. Send at most {MAX_STOP_STRINGS}.", "stop"
        )
    sizes = [len(s.encode("utf-8", "surrogatepass")) for s in stop_strings]
    if 0 in sizes:
        raise invalid_request(
            "'stop' has an empty string, which would end every answer. Remove it.", "stop"
        )
    if max(sizes, default=0) > MAX_STOP_STRING_BYTES or sum(sizes) > MAX_TOTAL_STOP_BYTES:
        raise invalid_request(
            f"'stop' is too long. Send at most {MAX_STOP_STRING_BYTES} bytes per string and "
            f"{MAX_TOTAL_STOP_BYTES} in total.",
            "stop",
        )
    return stop_strings


def format_number(value: float) -> str:
    """Format a number for an error message. Numbers beyond 64 bits are not quoted, since they may have any length."""
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return "a number beyond 64 bits"
    return str(value) if math.isfinite(value) else "NaN or infinity"
