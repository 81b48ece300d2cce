"""From the parameters of a body to the sampling parameters of each choice."""

from __future__ import annotations

import secrets

from argosy.engine.serving.preprocessing import parameter_rules
from argosy.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    SamplingParams,
    invalid_request,
)

_MIN_TEMPERATURE = 1e-4
"""Temperatures below this are greedy: dividing by them would overflow."""
_DEFAULT_COMPLETION_MAX_TOKENS = 16


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request with `seed`: a pure function, 0 <= result < 2**63.

    Choice 0 has the request's own seed modulo 2**63, so that asking for one choice or for several
    gives the same first one. Choice i has SplitMix64's (Steele et al. 2014) i-th output from that
    state. A single choice can therefore be asked for again on its own, by its seed.
    """
    seed %= 2**63
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) >> 1


def request_seed(body: GenerationRequest) -> int:
    """The body's seed, or one drawn for it."""
    return secrets.randbits(63) if body.seed is None else body.seed


def build_sampling_params(
    body: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> SamplingParams:
    """Sampling parameters of a body that `rules.check` has passed, but for the seed.

    Raises ApiError (400) for ids outside the vocabulary, and when nothing is left to sample.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_request(
            f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens may be generated. Lower it.",
            "min_tokens",
        )
    top_k = max(body.top_k or 0, 0)
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=parameter_rules.check_logit_bias(body.logit_bias or {}, vocab_size),
        allowed_token_ids=_allowed_token_ids(body, vocab_size),
        stop=parameter_rules.normalize_stop_strings(body.stop),
        stop_token_ids=parameter_rules.normalize_token_ids(
            "stop_token_ids", body.stop_token_ids or [], vocab_size
        ),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, vocab_size),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    endings = eos_token_ids.union(params.stop_token_ids)
    left = endings.issuperset(params.allowed_token_ids or range(vocab_size))
    if min_tokens and left:
        raise invalid_request(
            "Before 'min_tokens' no token that ends the answer may be sampled, and no other one is "
            "allowed. Lower min_tokens or allow more tokens.",
            "min_tokens",
        )
    return params


def _allowed_token_ids(body: GenerationRequest, vocab_size: int) -> tuple[int, ...]:
    if body.allowed_token_ids is None:
        return ()
    if not body.allowed_token_ids:
        raise invalid_request(
            "'allowed_token_ids' is empty, so nothing could be sampled. Leave it out.",
            "allowed_token_ids",
        )
    return parameter_rules.normalize_token_ids(
        "allowed_token_ids", body.allowed_token_ids, vocab_size
    )


def chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """How many likeliest tokens a chat wants beside each token; None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_request("'top_logprobs' needs 'logprobs' to be true. Set it.", "top_logprobs")
    return None


def completion_logprobs(body: CompletionRequest) -> int | None:
    """As `chat_logprobs`; here `logprobs` is the number itself."""
    if body.logprobs is not None:
        parameter_rules.check_range(
            "logprobs", body.logprobs, parameter_rules.NumericRange(0, parameter_rules.MAX_LOGPROBS)
        )
    return body.logprobs


def chat_max_tokens(body: ChatCompletionRequest, remaining_tokens: int) -> int:
    """Most tokens of an answer; by default what is left of the context."""
    wanted = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(wanted) > 1:
        raise invalid_request(
            "'max_tokens' and 'max_completion_tokens' differ. Give only max_completion_tokens.",
            "max_completion_tokens",
        )
    limit = next(iter(wanted), None)
    if limit == 0:
        raise invalid_request("'max_tokens' must be at least 1.", "max_tokens")
    return remaining_tokens if limit is None else limit


def completion_max_tokens(body: CompletionRequest, remaining_tokens: int) -> int:
    """Most tokens of a completion, 16 by default; 0 only scores an echoed prompt."""
    if body.max_tokens == 0 and not body.echo:
        raise invalid_request(
            "'max_tokens' 0 needs 'echo' to be true: there would be no answer.", "max_tokens"
        )
    return (
        min(_DEFAULT_COMPLETION_MAX_TOKENS, remaining_tokens)
        if body.max_tokens is None
        else body.max_tokens
    )
