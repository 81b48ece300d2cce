"""A replica that was slow once gets requests again: else nobody would ever learn that it no longer is."""

from __future__ import annotations

import msgspec

from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import RESTED_S, Replica
from argosy.gateway.request_fields import read
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import Outcome
from argosy.protocol import parse_endpoint

ASKS = read(msgspec.json.encode({"model": "m", "prompt": "Hello", "max_tokens": 50}), "prompt")


def asked(pool: Pool, now: float) -> set[str]:
    """Who gets the next requests, one after the other."""
    names = set()
    for _ in range(40):
        picked = pool.pick(ASKS, "", 1, frozenset(), now)
        assert picked is not None
        names.add(picked.replica.name)
    return names


def test_one_that_was_slow_is_tried_again_after_a_rest() -> None:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    slow, other = (Replica(name, "openai", "m", upstream) for name in ("slow", "other"))
    pool = Pool("m", [slow, other])
    for each in (slow, other):
        each.look_after(100.0)
        each.sent(10)
        each.look_after(100.0)
    slow.streamed(10, 20.0)
    other.streamed(10, 0.5)
    slow.ended(Outcome.SUCCESS, 100.0)
    assert asked(pool, 100.0) == {"other"}
    for each in (slow, other):
        each.look_after(100.0 + RESTED_S)
    assert asked(pool, 100.0 + RESTED_S) == {"other"}
    for each in (slow, other):
        each.look_after(101.0 + RESTED_S)
    assert "slow" in asked(pool, 101.0 + RESTED_S)
    assert other.load.decode_s == 0.05
