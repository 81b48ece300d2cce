"""Sampling parameters of `LLM` and `AsyncLLM`, with the names and defaults of vLLM."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from argosy.engine.argument_errors import unknown_argument_error

Params = TypeVar("Params")
DEFAULT_MAX_TOKENS = 16


class _UnsupportedOption(NamedTuple):
    """Option of vLLM without an equivalent here."""

    neutral_values: tuple[object, ...]
    """Values with which the option has no effect."""
    remedy: str


_UNSUPPORTED_OPTIONS = {
    "best_of": _UnsupportedOption(
        (None, 1), "Set n, and rank the outputs by `cumulative_logprob`."
    ),
    "use_beam_search": _UnsupportedOption((None, False), "Set n and a temperature."),
    "length_penalty": _UnsupportedOption((None, 1.0), "It only applies to beam search."),
    "early_stopping": _UnsupportedOption((None, False), "It only applies to beam search."),
    "logits_processors": _UnsupportedOption(
        (None, []), "Use logit_bias, allowed_token_ids or structured_outputs."
    ),
    "guided_decoding": _UnsupportedOption((None,), "Use structured_outputs."),
    "detokenize": _UnsupportedOption((None, True), "Outputs always have a text."),
    "output_kind": _UnsupportedOption((None,), "`AsyncLLM.stream` yields cumulative outputs."),
    "flat_logprobs": _UnsupportedOption((None, False), "Read the list `logprobs`."),
    "logprob_token_ids": _UnsupportedOption((None, []), "Use logprobs."),
    "prompt_logprob_token_ids": _UnsupportedOption((None, []), "Use prompt_logprobs."),
    "prompt_logprob_start": _UnsupportedOption((None, 0), "Use prompt_logprobs."),
    "repetition_detection": _UnsupportedOption((None,), "Use repetition_penalty."),
    "skip_reading_prefix_cache": _UnsupportedOption(
        (None, False), "Give the prompt a `cache_salt` of its own."
    ),
    "extra_args": _UnsupportedOption((None, {}), "Remove it."),
    "watermarking": _UnsupportedOption((None, False), "Remove it."),
    "stream_interval": _UnsupportedOption((None, 1), "`AsyncLLM.stream` yields every token."),
}


def _with_vllm_options(cls: type[Params]) -> type[Params]:
    """Let a dataclass accept vLLM's other options if they have no effect, and refuse them by name if they have."""
    original_init = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]

    @functools.wraps(original_init)
    def init(self: Params, **options: Any) -> None:  # noqa: ANN401 - options have any type
        for name in [name for name in options if name not in names]:
            option = _UNSUPPORTED_OPTIONS.get(name)
            if option is None:
                raise unknown_argument_error("SamplingParams", name, names)
            if options.pop(name) not in option.neutral_values:
                raise ValueError(f"SamplingParams has no {name}. {option.remedy}")
        original_init(self, **options)

    cls.__init__ = init  # type: ignore[assignment]
    return cls


@_with_vllm_options
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of the outputs of one prompt.

    Numbers and lists may come from numpy or torch. The values are validated when a request is made.

    Raises:
        ValueError: An option of vLLM is not supported. The message names what to use.
        TypeError: An option is unknown.
    """

    n: int = 1
    """Number of outputs."""
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """Largest number of tokens of an output. None allows the rest of the model's context."""
    min_tokens: int = 0
    """Tokens before which end-of-sequence and stop tokens are not sampled."""
    temperature: float = 1.0
    """Temperature. 0 is greedy sampling."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0 and -1 take all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be sampled. None allows all."""
    seed: int | None = None
    """Random seed. Equal seeds give equal outputs."""
    stop: str | Sequence[str] | None = None
    """Text, or several texts, before which the output ends."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned besides the sampled one."""
    prompt_logprobs: int | None = None
    """Same as `logprobs` for each prompt token except the first."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    bad_words: Sequence[str] | None = None
    truncate_prompt_tokens: int | None = None
    """Number of tokens at the end of a longer prompt that are kept."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning in a chat answer."""
    structured_outputs: Mapping[str, Any] | object | None = None
    """Constraint of the text: a mapping or an object with one of `json`, `regex`, `choice`, `grammar` and so on."""

    def to_body_fields(self) -> dict[str, Any]:
        """Return the fields of a request body, without those that are None. `logprobs` is not among them."""
        values = {
            field.name: to_plain(getattr(self, field.name))
            for field in fields(self)
            if field.name not in ("logprobs", "structured_outputs", "logit_bias")
        }
        if self.logit_bias:
            values["logit_bias"] = {
                to_plain(token_id): to_plain(bias) for token_id, bias in self.logit_bias.items()
            }
        if self.structured_outputs is not None:
            values["structured_outputs"] = _to_mapping(self.structured_outputs)
        return {name: value for name, value in values.items() if value is not None}


def to_plain(value: Any) -> Any:  # noqa: ANN401 - arguments have any type
    """Convert scalars and arrays of numpy and torch, and sequences of them, to plain Python values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [to_plain(item) for item in value]
    return value


def _to_mapping(constraint: Mapping[str, Any] | object) -> dict[str, Any]:
    """Return the set fields of a constraint, which may be an object such as vLLM's StructuredOutputsParams."""
    values = constraint if isinstance(constraint, Mapping) else vars(constraint)
    return {name: value for name, value in values.items() if value is not None}
