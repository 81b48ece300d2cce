"""A replica that was slow gets requests again. Otherwise its measured speed would never recover."""

from __future__ import annotations

import msgspec
from tests.support.placed_requests import select_replica

from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import AttemptOutcome
from argosy.policy.placement.replica import SPEED_MAX_AGE_S
from argosy.protocol import parse_endpoint

FIELDS = parse_request_fields(
    msgspec.json.encode({"model": "m", "prompt": "Hello", "max_tokens": 50}), "prompt"
)


def select_many(pool: Pool, now: float) -> set[str]:
    """Return the names of the replicas that get the next 40 requests."""
    names = set()
    for _ in range(40):
        decision = select_replica(pool, FIELDS, now=now)
        assert decision is not None
        names.add(decision.replica.name)
    return names


def test_slow_replica_is_tried_again_after_rest() -> None:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    slow, other = (ReplicaEndpoint(name, "openai", "m", upstream) for name in ("slow", "other"))
    pool = Pool("m", [slow, other])
    for replica in (slow, other):
        replica.expire_speed(100.0)
        replica.on_request_sent(10)
        replica.expire_speed(100.0)
    slow.on_tokens_streamed(10, 20.0)
    other.on_tokens_streamed(10, 0.5)
    slow.on_request_ended(AttemptOutcome.SUCCESS, 100.0)
    assert select_many(pool, 100.0) == {"other"}
    for replica in (slow, other):
        replica.expire_speed(100.0 + SPEED_MAX_AGE_S)
    assert select_many(pool, 100.0 + SPEED_MAX_AGE_S) == {"other"}
    for replica in (slow, other):
        replica.expire_speed(101.0 + SPEED_MAX_AGE_S)
    assert "slow" in select_many(pool, 101.0 + SPEED_MAX_AGE_S)
    assert other.load.inter_token_s == 0.05
