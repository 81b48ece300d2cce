"""What each body parameter may be: one table of what is refused by name, one of numeric ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from argosy.protocol import ApiError, invalid

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Refusal:
    """The only values of a parameter that can be served, and why not the others."""

    serves: Callable[[Any], bool]
    why: str


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval, open below where `above_low`."""

    low: float
    high: float
    above_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'above' if self.above_low else 'at least'} {self.low} and at most {self.high}"


def _nothing(value: object) -> bool:
    return not value


def _never(value: object) -> bool:  # noqa: ARG001 - the face of the table's predicates
    return False


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


REFUSED: dict[str, Refusal] = {
    # tools and structured output
    "tools": Refusal(_nothing, "Tool calling is not supported yet."),
    "tool_choice": Refusal(_one_of("none", "auto"), "Tool calling is not supported yet."),
    "functions": Refusal(_nothing, "Function calling is not supported yet."),
    "function_call": Refusal(_one_of("none", "auto"), "Function calling is not supported yet."),
    "response_format": Refusal(
        _one_of({"type": "text"}),
        'Only {"type": "text"} is supported yet; output is not constrained.',
    ),
    "structured_outputs": Refusal(_nothing, "Structured output is not supported yet."),
    # other kinds of input and output
    "audio": Refusal(_never, "Audio is not supported."),
    "modalities": Refusal(_one_of(["text"]), 'Only ["text"] is supported.'),
    "documents": Refusal(_nothing, "Documents are not supported; put their text into a message."),
    "suffix": Refusal(_nothing, "This model cannot fill in the middle."),
    "web_search_options": Refusal(_never, "Web search is not supported."),
    "moderation": Refusal(_never, "Moderation is not supported."),
    "prediction": Refusal(_never, "Predicted output is not supported."),
    # how the model answers
    "reasoning_effort": Refusal(_one_of("none"), "The model has no reasoning levels."),
    "include_reasoning": Refusal(bool, "Reasoning is not told apart from the answer yet."),
    "thinking_token_budget": Refusal(_never, "Thinking budgets are not supported."),
    "verbosity": Refusal(
        _one_of("medium"), "The model has no verbosity levels; ask for it in a message."
    ),
    "chat_template": Refusal(
        _never, "Templates from requests are not run; start the server with --chat-template."
    ),
    # sampling that we do not do
    "use_beam_search": Refusal(_nothing, "Beam search is not supported."),
    "length_penalty": Refusal(
        _one_of(1), "It only means something to beam search, which is not supported."
    ),
    "bad_words": Refusal(_nothing, "It is not supported; use logit_bias."),
    "logprob_token_ids": Refusal(_nothing, "It is not supported; use top_logprobs."),
    "kv_transfer_params": Refusal(_nothing, "KV transfer is not supported."),
    # what the service around the model would do
    "stream_interval": Refusal(_one_of(1), "Tokens are sent as they come."),
    "store": Refusal(_nothing, "Completions are not stored here."),
    "service_tier": Refusal(_one_of("auto", "default"), 'Only "auto" and "default" exist.'),
    "priority": Refusal(
        lambda value: 0 <= value <= 8,
        "A request may only lower its own priority: 0 (as it is) to 8.",
    ),
}
"""Parameters whose wish we cannot honour: refused by name, never ignored."""

ACCEPTED_AS_METADATA = frozenset(
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

RANGES: dict[str, Range] = {
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above_low=True),
    "top_k": Range(-1, MAX_TOKENS),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100),
    "n": Range(1, MAX_CHOICES),
    "seed": Range(INT64_MIN, INT64_MAX),
    "max_tokens": Range(0, MAX_TOKENS),
    "max_completion_tokens": Range(1, MAX_TOKENS),
    "min_tokens": Range(0, MAX_TOKENS),
    "top_logprobs": Range(0, MAX_LOGPROBS),
    "prompt_logprobs": Range(0, MAX_LOGPROBS),
    "truncate_prompt_tokens": Range(1, MAX_TOKENS),
}

MAX_LISTED_IDS = 1024
MAX_STOPS = 64
MAX_STOP_BYTES = 1024
MAX_STOPS_BYTES = 8192
BIAS = Range(-100, 100)


def check(given: Mapping[str, Any]) -> None:
    """Refuse parameters that cannot be honoured and numbers out of range; None means left out.

    Raises ApiError (400) naming the parameter.
    """
    for name, refusal in REFUSED.items():
        value = given.get(name)
        if value is not None and not refusal.serves(value):
            raise unsupported(name, refusal.why)
    for name, allowed in RANGES.items():
        value = given.get(name)
        if value is not None:
            in_range(name, value, allowed)


def in_range(name: str, value: float, allowed: Range) -> None:
    """Refuse a number outside `allowed`; NaN is outside of everything."""
    if value not in allowed:
        raise invalid(f"'{name}' must be {allowed}, not {_shown(value)}.", name)


def unsupported(name: str, why: str) -> ApiError:
    """The refusal of a parameter by name."""
    return invalid(f"'{name}' cannot be honoured as given: {why}", name, "unsupported_parameter")


def token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Refuse ids outside of the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid(
            f"'{name}' has the token id {_shown(wrong)}; the model's go from 0 to {vocab_size - 1}.",
            name,
        )


def listed_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """A short list of token ids, checked, each once, in order."""
    if len(ids) > MAX_LISTED_IDS:
        raise invalid(f"'{name}' has {len(ids)} token ids; give at most {MAX_LISTED_IDS}.", name)
    token_ids(name, ids, vocab_size)
    return tuple(sorted(set(ids)))


def logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    """The bias of each token id, checked."""
    listed_ids("logit_bias", list(bias), vocab_size)
    for value in bias.values():
        in_range("logit_bias", value, BIAS)
    return bias


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings, checked, each once, in order."""
    stops = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop or []))
    if len(stops) > MAX_STOPS:
        raise invalid(f"'stop' has {len(stops)} strings; give at most {MAX_STOPS}.", "stop")
    sizes = [len(s.encode("utf-8", "surrogatepass")) for s in stops]
    if 0 in sizes:
        raise invalid(
            "'stop' has an empty string, which would end every answer. Leave it out.", "stop"
        )
    if max(sizes, default=0) > MAX_STOP_BYTES or sum(sizes) > MAX_STOPS_BYTES:
        raise invalid(
            f"'stop' is too long: give at most {MAX_STOP_BYTES} bytes each, {MAX_STOPS_BYTES} in all.",
            "stop",
        )
    return stops


def _shown(value: float) -> str:
    """A number as an error may quote it: clients may send a thousand digits."""
    if isinstance(value, int) and abs(value) > INT64_MAX:
        return "a number beyond 64 bits"
    return str(value) if math.isfinite(value) else "NaN or infinity"
