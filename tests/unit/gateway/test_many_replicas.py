"""Routing in a pool of many replicas, where each request is compared with some of them only."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.placed_requests import select_replica

from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import ROUTING_POLICIES, AttemptOutcome, RoutingPolicyName
from argosy.policy.placement import Selection
from argosy.policy.placement.pool import MAX_COMPARED_REPLICAS
from argosy.protocol import parse_endpoint

COUNT = 4 * MAX_COMPARED_REPLICAS


def make_pool(count: int = COUNT, policy: RoutingPolicyName = "least-cost") -> Pool:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replicas = [
        ReplicaEndpoint(f"r{number:03}", "openai", "m", upstream) for number in range(count)
    ]
    return Pool("m", replicas, policy)


def select(replicas: Pool, prompt: str = "Hello", session: str = "") -> Selection | None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 5, "session_id": session or None}
    return select_replica(replicas, parse_request_fields(msgspec.json.encode(body), "prompt"))


def fill(replica: ReplicaEndpoint) -> None:
    replica.load.in_flight = replica.slots


def select_name(replicas: Pool, prompt: str = "Hello", session: str = "") -> str:
    decision = select(replicas, prompt, session)
    assert decision is not None
    return decision.replica.name


def test_request_is_compared_with_some_and_all_replicas_get_requests() -> None:
    replicas, selected = make_pool(), set()
    for number in range(20 * COUNT):
        decision = select(replicas, f"Hello {number}")
        assert decision is not None
        assert (
            len(decision.candidates)
            == len({each.cost.replica for each in decision.candidates})
            <= MAX_COMPARED_REPLICAS + 1
        )
        decision.replica.on_request_sent(100)
        selected.add(decision.replica.name)
    assert len(selected) == COUNT
    assert max(each.load.in_flight for each in replicas.replicas.values()) <= 2 * 20


def test_small_pool_is_compared_completely() -> None:
    decision = select(make_pool(MAX_COMPARED_REPLICAS))
    assert decision is not None
    assert len(decision.candidates) == MAX_COMPARED_REPLICAS


def test_conversation_stays_on_its_replica() -> None:
    replicas = make_pool()
    prompts = [f"You are number {number}. " + "Say more. " * 300 for number in range(50)]
    homes = [select_name(replicas, prompt) for prompt in prompts]
    assert len(set(homes)) > 1
    for turn in range(5):
        prompts = [f"{prompt} This is turn {turn}. " + "And more. " * 200 for prompt in prompts]
        assert [select_name(replicas, prompt) for prompt in prompts] == homes


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_only_replica_with_free_slot_is_found(policy: RoutingPolicyName) -> None:
    replicas = make_pool(policy=policy)
    *others, last = replicas.replicas.values()
    for other in others:
        fill(other)
    assert {select_name(replicas, f"Hello {number}") for number in range(20)} == {last.name}
    fill(last)
    assert select(replicas) is None


def test_only_healthy_replica_is_found() -> None:
    replicas = make_pool()
    *others, last = replicas.replicas.values()
    for other in others:
        while other.health.breaker.is_closed:
            other.health.breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert {select_name(replicas, f"Hello {number}") for number in range(20)} == {last.name}


def test_round_robin_and_hash_consider_all_replicas() -> None:
    taking_turns, kept = make_pool(policy="round-robin"), make_pool(policy="hash")
    assert sorted(select_name(taking_turns) for _ in range(COUNT)) == list(taking_turns.replicas)
    homes = {select_name(kept, session="ann") for _ in range(20)}
    assert len(homes) == 1
