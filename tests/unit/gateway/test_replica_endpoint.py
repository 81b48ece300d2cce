"""A replica's estimates of waiting tokens and of cached prompts."""

from __future__ import annotations

from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import BLOCK_BYTES, EstimatedPrefixIndex, compute_prefix_keys
from argosy.protocol import parse_endpoint


def test_sent_tokens_count_as_waiting_until_their_prefill_is_done() -> None:
    """Applies to replicas that report their load, which already includes older requests, and to others."""
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replica = ReplicaEndpoint("r", "openai", "m", upstream)
    load = replica.load
    for tokens in (500, 300, 200):
        replica.on_request_sent(tokens)
    replica.on_prefill_done(500, sent_at=9.5)
    assert load.sent_tokens == 500
    load.reported_at, load.sent_tokens = 10.0, 0
    replica.on_request_sent(100)
    replica.on_prefill_done(300, sent_at=9.5)
    assert load.sent_tokens == 100
    for _ in range(4):
        replica.on_request_ended(None, 11.0)
    assert load.sent_tokens == 0


def test_estimated_prefix_index_is_bounded_for_many_distinct_prompts() -> None:
    index = EstimatedPrefixIndex(100)
    for number in range(2000):
        keys = compute_prefix_keys(b"%d" % number, b"x" * BLOCK_BYTES * 2, BLOCK_BYTES)
        index.on_prompt_sent(keys)
        assert len(index) <= 100
