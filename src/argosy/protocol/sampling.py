"""Sampling parameters, as `LLM` takes them and as the engine receives them, with the names and defaults of vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec


class ReasoningBlock(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Block of reasoning ("thinking") at the start of the output. A grammar applies only after its end."""

    end_ids: tuple[int, ...]
    """Token ids that close the block, as one sequence."""
    start_ids: tuple[int, ...] = ()
    """Token ids that open the block as the first output. Empty if the prompt has opened it."""
    budget: int | None = None
    """Number of reasoning tokens after which the engine closes the block; None for no limit."""


class UnsupportedOption(NamedTuple):
    """Option of vLLM without an equivalent here."""

    neutral_values: tuple[object, ...]
    """Values with which the option has no effect."""
    remedy: str


_UNSUPPORTED_OPTIONS = {
    "best_of": UnsupportedOption((None, 1), "Set n, and rank the outputs by `cumulative_logprob`."),
    "use_beam_search": UnsupportedOption((None, False), "Set n and a temperature."),
    "length_penalty": UnsupportedOption((None, 1.0), "It only applies to beam search."),
    "early_stopping": UnsupportedOption((None, False), "It only applies to beam search."),
    "logits_processors": UnsupportedOption(
        (None, []), "Use logit_bias, allowed_token_ids or structured_outputs."
    ),
    "guided_decoding": UnsupportedOption((None,), "Use structured_outputs."),
    "detokenize": UnsupportedOption((None, True), "Outputs always have a text."),
    "output_kind": UnsupportedOption((None,), "`AsyncLLM.stream` yields cumulative outputs."),
    "flat_logprobs": UnsupportedOption((None, False), "Read the list `logprobs`."),
    "logprob_token_ids": UnsupportedOption((None, []), "Use logprobs."),
    "prompt_logprob_token_ids": UnsupportedOption((None, []), "Use prompt_logprobs."),
    "prompt_logprob_start": UnsupportedOption((None, 0), "Use prompt_logprobs."),
    "repetition_detection": UnsupportedOption((None,), "Use repetition_penalty."),
    "skip_reading_prefix_cache": UnsupportedOption(
        (None, False), "Give the prompt a `cache_salt` of its own."
    ),
    "extra_args": UnsupportedOption((None, {}), "Remove it."),
    "watermarking": UnsupportedOption((None, False), "Remove it."),
    "stream_interval": UnsupportedOption((None, 1), "`AsyncLLM.stream` yields every token."),
}


def unknown_argument_error(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error for an argument that `function` does not have. It names the most similar known argument."""
    similar = difflib.get_close_matches(name, list(known), 1, 0.6)
    hint = f"; did you mean {similar[0]}?" if similar else "; remove it"
    return TypeError(f"{function} has no argument {name!r}{hint}")


class _AcceptsVllmOptions(msgspec.StructMeta):
    """Lets a structure accept vLLM's other options if they have no effect, and refuse them by name if they have."""

    def __call__(cls, **options: Any) -> Any:  # noqa: ANN401, N805 - options have any type
        for name in options.keys() - set(cls.__struct_fields__):
            option = _UNSUPPORTED_OPTIONS.get(name)
            if option is None:
                raise unknown_argument_error(cls.__name__, name, cls.__struct_fields__)
            if options.pop(name) not in option.neutral_values:
                raise ValueError(f"{cls.__name__} has no {name}. {option.remedy}")
        return super().__call__(**options)


class SamplingParams(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, metaclass=_AcceptsVllmOptions
):
    """Sampling parameters of the outputs of one prompt.

    Callers of `LLM` may give numbers and sequences of numpy or torch. The package `engine.serving.preprocessing`
    validates every value before the engine receives it, as plain Python values.

    Raises:
        ValueError: An option of vLLM is not supported. The message names what to use.
        TypeError: An option is unknown.
    """

    n: int = 1
    """Number of outputs. The engine receives one request for each."""
    max_tokens: int | None = 16
    """Largest number of tokens of an output, including those of a resumed request. None allows the rest of the model's
    context; the preprocessing replaces it by that number."""
    min_tokens: int = 0
    """Tokens before which end-of-sequence and stop tokens are not sampled."""
    temperature: float = 1.0
    """Temperature. 0 is greedy sampling."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0 and -1 take all."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Penalty over prompt and output tokens (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Penalty over output tokens."""
    frequency_penalty: float = 0.0
    """Penalty over output tokens."""
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: Sequence[int] | None = None
    """Tokens that may be sampled. None allows all."""
    seed: int | None = None
    """Random seed. Equal seeds give equal outputs. The preprocessing draws one for None, in [0, 2**63)."""
    stop: Sequence[str] = ()
    """Text, or several texts, before which the output ends. The replica server finds them, not the engine core."""
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned besides the sampled one. None returns none."""
    prompt_logprobs: int | None = None
    """Same as `logprobs` for each prompt token except the first."""
    skip_special_tokens: bool = True

    # Only the preprocessing reads these.
    spaces_between_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    truncate_prompt_tokens: int | None = None
    """Number of tokens at the end of a longer prompt that are kept."""
    thinking_token_budget: int | None = None
    """Tokens of reasoning in a chat answer."""
    structured_outputs: Any = None
    """Constraint of the text: a mapping or an object with one of `json`, `regex`, `choice`, `grammar` and so on."""

    # Only the preprocessing sets these.
    grammar: str = ""
    """Grammar of the output in the format of llguidance. Empty if the output is not constrained."""
    reasoning: ReasoningBlock | None = None
    """Reasoning block that precedes the constrained output, or whose length is limited. None for neither."""
    banned_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled, such as the trigger of a tool call that the request forbids."""
