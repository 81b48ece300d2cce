"""Rules for parameters with token ids. The rules that hold for every model are in `argosy.protocol`."""

from __future__ import annotations

from argosy.protocol import NumericRange, check_range, format_number, invalid_request

MAX_LISTED_IDS = 1024
LOGIT_BIAS_RANGE = NumericRange(-100, 100)


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
