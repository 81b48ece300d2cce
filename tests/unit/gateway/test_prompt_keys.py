"""Which prompts may be taken for the same: none of another domain, model or salt, or rendered otherwise."""

from __future__ import annotations

import msgspec
import pytest

from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.protocol import parse_endpoint

PROMPT = "Tell me of the king. " * 100


def keys(domain: str = "", model: str = "m", **extra: object) -> list[bytes]:
    """What the prompt is known by."""
    replica = ReplicaEndpoint("r", "openai", model, Upstream(parse_endpoint("http://localhost:1")))
    ask = parse_request_fields(
        msgspec.json.encode({"model": model, "prompt": PROMPT, **extra}), "prompt"
    )
    picked = Pool(model, [replica]).select_replica(ask, domain, 1, frozenset(), 0.0)
    assert picked is not None
    return picked.block_keys


@pytest.mark.parametrize(
    "other",
    [
        {"domain": "them"},
        {"model": "another"},
        {"cache_salt": "mine"},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"add_special_tokens": False},
    ],
)
def test_what_makes_other_tokens_or_keeps_them_apart_makes_other_keys(
    other: dict[str, object],
) -> None:
    assert keys()
    assert set(keys()).isdisjoint(keys(**other))  # type: ignore[arg-type]


def test_salts_differ() -> None:
    assert set(keys(cache_salt="a")).isdisjoint(keys(cache_salt="b"))
    assert keys(cache_salt="a") == keys(cache_salt="a")


def test_what_only_shapes_the_answer_makes_none() -> None:
    assert keys(temperature=0.5, max_tokens=9, stream=True, seed=3, n=2) == keys()
