"""Block keys of prompts differ between cache domains, models, salts and renderings."""

from __future__ import annotations

import msgspec
import pytest

from argosy.gateway.pool.placement_requests import compute_block_keys
from argosy.gateway.request_fields import parse_request_fields

PROMPT = "Tell me of the king. " * 100


def block_keys(domain: str = "", model: str = "m", **extra: object) -> list[bytes]:
    """Return the keys by which the pool finds the prompt's blocks."""
    fields = parse_request_fields(
        msgspec.json.encode({"model": model, "prompt": PROMPT, **extra}), "prompt"
    )
    return compute_block_keys(fields, domain, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"domain": "them"},
        {"model": "another"},
        {"cache_salt": "mine"},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"add_special_tokens": False},
    ],
)
def test_keys_differ_if_tokens_or_isolation_differ(
    changes: dict[str, object],
) -> None:
    assert block_keys()
    assert set(block_keys()).isdisjoint(block_keys(**changes))  # type: ignore[arg-type]


def test_keys_differ_by_salt() -> None:
    assert set(block_keys(cache_salt="a")).isdisjoint(block_keys(cache_salt="b"))
    assert block_keys(cache_salt="a") == block_keys(cache_salt="a")


def test_sampling_parameters_do_not_change_keys() -> None:
    assert block_keys(temperature=0.5, max_tokens=9, stream=True, seed=3, n=2) == block_keys()
