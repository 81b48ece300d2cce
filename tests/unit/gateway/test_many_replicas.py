"""A pool of very many replicas: a request is compared with some of them, and finds what it needs all the same."""

from __future__ import annotations

import msgspec
import pytest

from argosy.gateway.pool.pool import MAX_COMPARED_REPLICAS, Pool, RoutingDecision
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import ROUTING_POLICIES, AttemptOutcome, RoutingPolicyName
from argosy.protocol import parse_endpoint

MANY = 4 * MAX_COMPARED_REPLICAS


def pool(count: int = MANY, rule: RoutingPolicyName = "least-cost") -> Pool:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replicas = [
        ReplicaEndpoint(f"r{number:03}", "openai", "m", upstream) for number in range(count)
    ]
    return Pool("m", replicas, rule)


def pick(replicas: Pool, prompt: str = "Hello", session: str = "") -> RoutingDecision | None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 5, "session_id": session or None}
    return replicas.select_replica(
        parse_request_fields(msgspec.json.encode(body), "prompt"), "", 1, frozenset(), 0.0
    )


def full(replica: ReplicaEndpoint) -> None:
    replica.load.in_flight = replica.slots


def went(replicas: Pool, prompt: str = "Hello", session: str = "") -> str:
    picked = pick(replicas, prompt, session)
    assert picked is not None
    return picked.replica.name


def test_it_is_compared_with_some_and_all_get_requests() -> None:
    replicas, got = pool(), set()
    for number in range(20 * MANY):
        picked = pick(replicas, f"Hello {number}")
        assert picked is not None
        assert (
            len(picked.costs)
            == len({cost.replica for cost in picked.costs})
            <= MAX_COMPARED_REPLICAS + 1
        )
        picked.replica.on_request_sent(100)
        got.add(picked.replica.name)
    assert len(got) == MANY
    assert max(each.load.in_flight for each in replicas.replicas.values()) <= 2 * 20


def test_few_are_all_compared() -> None:
    picked = pick(pool(MAX_COMPARED_REPLICAS))
    assert picked is not None
    assert len(picked.costs) == MAX_COMPARED_REPLICAS


def test_a_conversation_goes_on_where_it_was() -> None:
    replicas = pool()
    prompts = [f"You are number {number}. " + "Say more. " * 300 for number in range(50)]
    homes = [went(replicas, prompt) for prompt in prompts]
    assert len(set(homes)) > 1
    for turn in range(5):
        prompts = [f"{prompt} This is turn {turn}. " + "And more. " * 200 for prompt in prompts]
        assert [went(replicas, prompt) for prompt in prompts] == homes


@pytest.mark.parametrize("rule", ROUTING_POLICIES)
def test_the_only_one_with_room_is_found(rule: RoutingPolicyName) -> None:
    replicas = pool(rule=rule)
    *others, last = replicas.replicas.values()
    for other in others:
        full(other)
    assert {went(replicas, f"Hello {number}") for number in range(20)} == {last.name}
    full(last)
    assert pick(replicas) is None


def test_the_only_one_that_does_not_fail_is_found() -> None:
    replicas = pool()
    *others, last = replicas.replicas.values()
    for other in others:
        while other.breaker.is_closed:
            other.breaker.record_outcome(AttemptOutcome.FAILURE, 0.0)
    assert {went(replicas, f"Hello {number}") for number in range(20)} == {last.name}


def test_round_robin_and_sessions_see_all() -> None:
    taking_turns, kept = pool(rule="round-robin"), pool(rule="hash")
    assert sorted(went(taking_turns) for _ in range(MANY)) == list(taking_turns.replicas)
    homes = {went(kept, session="ann") for _ in range(20)}
    assert len(homes) == 1
