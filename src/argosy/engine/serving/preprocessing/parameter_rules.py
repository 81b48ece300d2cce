"""What each body parameter may be: one table of what is refused by name, one of numeric ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.protocol import ApiError, invalid_request

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ParameterRestriction:
    """The only values of a parameter that can be served, and why not the others."""

    is_supported: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True, slots=True)
class NumericRange:
    """A closed interval, open below where `above_low`."""

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


def _is_never_supported(value: object) -> bool:  # noqa: ARG001 - the face of the table's predicates
    return False


def _is_one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


RESTRICTED_PARAMETERS: dict[str, ParameterRestriction] = {
    # tools and structured output
    "tools": ParameterRestriction(_is_empty, "Tool calling is not supported yet."),
    "tool_choice": ParameterRestriction(
        _is_one_of("none", "auto"), "Tool calling is not supported yet."
    ),
    "functions": ParameterRestriction(_is_empty, "Function calling is not supported yet."),
    "function_call": ParameterRestriction(
        _is_one_of("none", "auto"), "Function calling is not supported yet."
    ),
    "response_format": ParameterRestriction(
        _is_one_of({"type": "text"}),
        'Only {"type": "text"} is supported yet; output is not constrained.',
    ),
    "structured_outputs": ParameterRestriction(
        _is_empty, "Structured output is not supported yet."
    ),
    # other kinds of input and output
    "audio": ParameterRestriction(_is_never_supported, "Audio is not supported."),
    "modalities": ParameterRestriction(_is_one_of(["text"]), 'Only ["text"] is supported.'),
    "documents": ParameterRestriction(
        _is_empty, "Documents are not supported; put their text into a message."
    ),
    "suffix": ParameterRestriction(_is_empty, "This model cannot fill in the middle."),
    "web_search_options": ParameterRestriction(_is_never_supported, "Web search is not supported."),
    "moderation": ParameterRestriction(_is_never_supported, "Moderation is not supported."),
    "prediction": ParameterRestriction(_is_never_supported, "Predicted output is not supported."),
    # how the model answers
    "reasoning_effort": ParameterRestriction(
        _is_one_of("none"), "The model has no reasoning levels."
    ),
    "include_reasoning": ParameterRestriction(
        bool, "Reasoning is not told apart from the answer yet."
    ),
    "thinking_token_budget": ParameterRestriction(
        _is_never_supported, "Thinking budgets are not supported."
    ),
    "verbosity": ParameterRestriction(
        _is_one_of("medium"), "The model has no verbosity levels; ask for it in a message."
    ),
    "chat_template": ParameterRestriction(
        _is_never_supported,
        "Templates from requests are not run; start the server with --chat-template.",
    ),
    # sampling that we do not do
    "use_beam_search": ParameterRestriction(_is_empty, "Beam search is not supported."),
    "length_penalty": ParameterRestriction(
        _is_one_of(1), "It only means something to beam search, which is not supported."
    ),
    "bad_words": ParameterRestriction(_is_empty, "It is not supported; use logit_bias."),
    "logprob_token_ids": ParameterRestriction(_is_empty, "It is not supported; use top_logprobs."),
    "kv_transfer_params": ParameterRestriction(_is_empty, "KV transfer is not supported."),
    # what the service around the model would do
    "stream_interval": ParameterRestriction(_is_one_of(1), "Tokens are sent as they come."),
    "store": ParameterRestriction(_is_empty, "Completions are not stored here."),
    "service_tier": ParameterRestriction(
        _is_one_of("auto", "default"), 'Only "auto" and "default" exist.'
    ),
    "priority": ParameterRestriction(
        lambda value: 0 <= value <= 8,
        "A request may only lower its own priority: 0 (as it is) to 8.",
    ),
}
"""Parameters whose wish we cannot honour: refused by name, never ignored."""

IGNORED_PARAMETERS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "request_id",
        "session_id",
        "parallel_tool_calls",  # without tools it says nothing
        "prompt_cache_key",  # hints: the prefix cache is always on, within the tenant's domain
        "prompt_cache_options",
        "prompt_cache_retention",
        "spaces_between_special_tokens",  # without effect on the tokenizers that we load
    }
)
"""Parameters that say nothing about the answer: accepted, and without effect on it."""

PARAMETER_RANGES: dict[str, NumericRange] = {
    "temperature": NumericRange(0, 100),
    "top_p": NumericRange(0, 1, exclusive_minimum=True),
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

MAX_LISTED_IDS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_BYTES = 1024
MAX_TOTAL_STOP_BYTES = 8192
LOGIT_BIAS_RANGE = NumericRange(-100, 100)


def check_parameters(parameters: Mapping[str, Any]) -> None:
    """Refuse parameters that cannot be honoured and numbers out of range; None means left out.

    Raises ApiError (400) naming the parameter.
    """
    for name, refusal in RESTRICTED_PARAMETERS.items():
        value = parameters.get(name)
        if value is not None and not refusal.is_supported(value):
            raise unsupported_parameter(name, refusal.reason)
    for name, allowed in PARAMETER_RANGES.items():
        value = parameters.get(name)
        if value is not None:
            check_range(name, value, allowed)


def check_range(name: str, value: float, allowed: NumericRange) -> None:
    """Refuse a number outside `allowed`; NaN is outside of everything."""
    if value not in allowed:
        raise invalid_request(f"'{name}' must be {allowed}, not {_format_number(value)}.", name)


def unsupported_parameter(name: str, reason: str) -> ApiError:
    """The refusal of a parameter by name."""
    return invalid_request(
        f"'{name}' cannot be honoured as given: {reason}", name, "unsupported_parameter"
    )


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Refuse ids outside of the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid_request(
            f"'{name}' has the token id {_format_number(wrong)}; the model's go from 0 to {vocab_size - 1}.",
            name,
        )


def normalize_token_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """A short list of token ids, checked, each once, in order."""
    if len(ids) > MAX_LISTED_IDS:
        raise invalid_request(
            f"'{name}' has {len(ids)} token ids; give at most {MAX_LISTED_IDS}.", name
        )
    check_token_ids(name, ids, vocab_size)
    return tuple(sorted(set(ids)))


def check_logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    """The bias of each token id, checked."""
    normalize_token_ids("logit_bias", list(bias), vocab_size)
    for value in bias.values():
        check_range("logit_bias", value, LOGIT_BIAS_RANGE)
    return bias


def normalize_stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, checked, each once, in order."""
    stops = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop or []))
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid_request(
            f"'stop' has {len(stops)} strings; give at most {MAX_STOP_STRINGS}.", "stop"
        )
    sizes = [len(s.encode("utf-8", "surrogatepass")) for s in stops]
    if 0 in sizes:
        raise invalid_request(
            "'stop' has an empty string, which would end every answer. Leave it out.", "stop"
        )
    if max(sizes, default=0) > MAX_STOP_STRING_BYTES or sum(sizes) > MAX_TOTAL_STOP_BYTES:
        raise invalid_request(
            f"'stop' is too long: give at most {MAX_STOP_STRING_BYTES} bytes each, {MAX_TOTAL_STOP_BYTES} in all.",
            "stop",
        )
    return stops


def _format_number(value: float) -> str:
    """A number as an error may quote it: clients may send a thousand digits."""
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return "a number beyond 64 bits"
    return str(value) if math.isfinite(value) else "NaN or infinity"
