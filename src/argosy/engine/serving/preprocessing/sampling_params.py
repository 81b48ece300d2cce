"""Sampling parameters of each choice, derived from a request body, and the model's rules for token ids."""

from __future__ import annotations

import secrets

from argosy.protocol import (
    MAX_LOGPROBS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    NumericRange,
    SamplingParams,
    check_range,
    format_number,
    invalid_request,
    normalize_stop_strings,
)

_MIN_TEMPERATURE = 1e-4
"""Lower temperatures are treated as greedy, because dividing by them would overflow."""
_DEFAULT_COMPLETION_MAX_TOKENS = 16
MAX_LISTED_IDS = 1024
LOGIT_BIAS_RANGE = NumericRange(-100, 100)


def choice_seed(seed: int, index: int) -> int:
    """Derive the seed of choice `index` of a request with `seed`. Returns a value in [0, 2**63).

    Choice 0 has the request's own seed modulo 2**63, so the first choice does not depend on `n`. Choice i has the i-th
    output of SplitMix64 (Steele et al. 2014) from that state. A single choice can therefore be reproduced with its own
    seed.
    """
    seed %= 2**63
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return (mixed ^ (mixed >> 31)) >> 1


def request_seed(body: GenerationRequest) -> int:
    """Return the body's seed, or a random one if the body has none."""
    return secrets.randbits(63) if body.seed is None else body.seed


def build_sampling_params(
    body: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    logit_bias: dict[int, float],
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> SamplingParams:
    """Build the sampling parameters, except the seed, of a body that `check_parameters` accepted.

    `logit_bias` is that of the body, by token id.

    Raises:
        ApiError: 400 for token ids outside the vocabulary, and if no token may be sampled.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid_request(
            f"'min_tokens' is {min_tokens}, but at most {max_tokens} tokens may be generated. Lower min_tokens.",
            "min_tokens",
        )
    top_k = max(body.top_k or 0, 0)
    temperature = 1.0 if body.temperature is None else float(body.temperature)
    if body.top_p == 0:  # of the likeliest token alone
        temperature = 0.0
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature if temperature >= _MIN_TEMPERATURE else 0.0,
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=body.top_p or 1.0,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=check_logit_bias(logit_bias, vocab_size),
        allowed_token_ids=_allowed_token_ids(body, vocab_size),
        stop=normalize_stop_strings(body.stop),
        stop_token_ids=normalize_token_ids("stop_token_ids", body.stop_token_ids or [], vocab_size),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        prompt_logprobs=None if prompt_logprobs is None else min(prompt_logprobs, vocab_size),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    end_token_ids = eos_token_ids.union(params.stop_token_ids)
    only_end_tokens = end_token_ids.issuperset(params.allowed_token_ids or range(vocab_size))
    if min_tokens and only_end_tokens:
        raise invalid_request(
            "'min_tokens' forbids the tokens that end the answer, and no other tokens are allowed. "
            "Lower min_tokens or allow more tokens.",
            "min_tokens",
        )
    return params


def _allowed_token_ids(body: GenerationRequest, vocab_size: int) -> tuple[int, ...] | None:
    if body.allowed_token_ids is None:
        return None
    if not body.allowed_token_ids:
        raise invalid_request(
            "'allowed_token_ids' is empty, so no token can be sampled. Remove the parameter or add ids.",
            "allowed_token_ids",
        )
    return normalize_token_ids("allowed_token_ids", body.allowed_token_ids, vocab_size)


def chat_logprobs(body: ChatCompletionRequest) -> int | None:
    """Return how many top log-probabilities a chat wants for each token, or None for no log-probabilities."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise invalid_request(
            "'top_logprobs' requires 'logprobs'. Set 'logprobs' to true.", "top_logprobs"
        )
    return None


def completion_logprobs(body: CompletionRequest) -> int | None:
    """Return the same as `chat_logprobs` for a completion, where `logprobs` is the number itself."""
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, NumericRange(0, MAX_LOGPROBS))
    return body.logprobs


def chat_max_tokens(
    body: ChatCompletionRequest, remaining_tokens: int, model_default: int | None = None
) -> int:
    """Return the maximum number of tokens of a chat answer. The default is the model's, or the rest of the context."""
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid_request(
            "'max_tokens' and 'max_completion_tokens' differ. Set only max_completion_tokens.",
            "max_completion_tokens",
        )
    limit = next(iter(limits), None)
    if limit == 0:
        raise invalid_request("'max_tokens' must be at least 1.", "max_tokens")
    return _limit_tokens(body, limit, remaining_tokens, model_default or remaining_tokens)


def completion_max_tokens(
    body: CompletionRequest, remaining_tokens: int, model_default: int | None = None
) -> int:
    """Return the maximum number of tokens of a completion. The default is the model's, or 16.

    0 only scores an echoed prompt.
    """
    if body.max_tokens == 0 and not body.echo:
        raise invalid_request(
            "'max_tokens' 0 requires 'echo', since the answer has no tokens. Set 'echo' to true.",
            "max_tokens",
        )
    default = model_default or _DEFAULT_COMPLETION_MAX_TOKENS
    return _limit_tokens(body, body.max_tokens, remaining_tokens, default)


def _limit_tokens(
    body: GenerationRequest, limit: int | None, remaining_tokens: int, default: int
) -> int:
    """Return the request's limit, or else the default. The default never exceeds the rest of the context."""
    if limit is not None and not body.clamp_max_tokens:
        return limit
    return min(default if limit is None else limit, remaining_tokens)


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Raise `ApiError` (400) for ids outside the model's vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        invalid_id = next(i for i in ids if not 0 <= i < vocab_size)
        raise invalid_request(
            f"'{name}' has the token id {format_number(invalid_id)}. Use ids from 0 to {vocab_size - 1}.",
            name,
        )


def normalize_token_ids(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """Validate a short list of token ids. Returns them sorted, without duplicates."""
    if len(ids) > MAX_LISTED_IDS:
        raise invalid_request(
            f"'{name}' has {len(ids)} token ids. Send at most {MAX_LISTED_IDS}.", name
        )
    check_token_ids(name, ids, vocab_size)
    return tuple(sorted(set(ids)))


def check_logit_bias(bias: dict[int, float], vocab_size: int) -> dict[int, float]:
    """Validate the bias of each token id and return the mapping unchanged."""
    normalize_token_ids("logit_bias", list(bias), vocab_size)
    for value in bias.values():
        check_range("logit_bias", value, LOGIT_BIAS_RANGE)
    return bias
