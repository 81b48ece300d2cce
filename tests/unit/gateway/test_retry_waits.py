"""A replica that was slow once gets requests again: else nobody would ever learn that it no longer is."""

from __future__ import annotations

import msgspec

from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import SPEED_MAX_AGE_S, ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import AttemptOutcome
from argosy.protocol import parse_endpoint

ASKS = parse_request_fields(
    msgspec.json.encode({"model": "m", "prompt": "Hello", "max_tokens": 50}), "prompt"
)


def asked(pool: Pool, now: float) -> set[str]:
    """Who gets the next requests, one after the other."""
    names = set()
    for _ in range(40):
        picked = pool.select_replica(ASKS, "", 1, frozenset(), now)
        assert picked is not None
        names.add(picked.replica.name)
    return names


def test_one_that_was_slow_is_tried_again_after_a_rest() -> None:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    slow, other = (ReplicaEndpoint(name, "openai", "m", upstream) for name in ("slow", "other"))
    pool = Pool("m", [slow, other])
    for each in (slow, other):
        each.expire_speed(100.0)
        each.on_request_sent(10)
        each.expire_speed(100.0)
    slow.on_tokens_streamed(10, 20.0)
    other.on_tokens_streamed(10, 0.5)
    slow.on_request_ended(AttemptOutcome.SUCCESS, 100.0)
    assert asked(pool, 100.0) == {"other"}
    for each in (slow, other):
        each.expire_speed(100.0 + SPEED_MAX_AGE_S)
    assert asked(pool, 100.0 + SPEED_MAX_AGE_S) == {"other"}
    for each in (slow, other):
        each.expire_speed(101.0 + SPEED_MAX_AGE_S)
    assert "slow" in asked(pool, 101.0 + SPEED_MAX_AGE_S)
    assert other.load.inter_token_s == 0.05
