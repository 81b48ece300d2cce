"""Selection of a replica in a pool: many replicas, slow replicas, and the keys of cached prompts."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.placed_requests import select_replica

from argosy.gateway.pool.placement_requests import compute_block_keys
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import ROUTING_POLICIES, AttemptOutcome, RoutingPolicyName
from argosy.policy.placement import Selection
from argosy.policy.placement.pool import MAX_COMPARED_REPLICAS
from argosy.policy.placement.replica import SPEED_MAX_AGE_S
from argosy.protocol import parse_endpoint

COUNT = 4 * MAX_COMPARED_REPLICAS
PROMPT = "Tell me of the king. " * 100


def make_pool(count: int = COUNT, policy: RoutingPolicyName = "least-cost") -> Pool:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replicas = [
        ReplicaEndpoint(f"r{number:03}", "openai", "m", upstream) for number in range(count)
    ]
    return Pool("m", replicas, policy)


def select(
    replicas: Pool, prompt: str = "Hello", session: str = "", now: float = 0.0
) -> Selection | None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 5, "session_id": session or None}
    fields = parse_request_fields(msgspec.json.encode(body), "prompt")
    return select_replica(replicas, fields, now=now)


def fill(replica: ReplicaEndpoint) -> None:
    replica.load.in_flight = replica.slots


def select_name(replicas: Pool, prompt: str = "Hello", session: str = "", now: float = 0.0) -> str:
    decision = select(replicas, prompt, session, now)
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


def test_slow_replica_is_tried_again_after_rest() -> None:
    """Otherwise its measured speed would never recover."""
    pool = make_pool(2)
    slow, other = pool.replicas.values()

    def select_names(now: float) -> set[str]:
        return {select_name(pool, now=now) for _ in range(40)}

    for replica in (slow, other):
        replica.expire_speed(100.0)
        replica.on_request_sent(10)
        replica.expire_speed(100.0)
    slow.on_tokens_streamed(10, 20.0)
    other.on_tokens_streamed(10, 0.5)
    slow.on_request_ended(AttemptOutcome.SUCCESS, 100.0)
    assert select_names(100.0) == {other.name}
    for replica in (slow, other):
        replica.expire_speed(100.0 + SPEED_MAX_AGE_S)
    assert select_names(100.0 + SPEED_MAX_AGE_S) == {other.name}
    for replica in (slow, other):
        replica.expire_speed(101.0 + SPEED_MAX_AGE_S)
    assert slow.name in select_names(101.0 + SPEED_MAX_AGE_S)
    assert other.load.inter_token_s == 0.05


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


def test_sampling_parameters_do_not_change_keys() -> None:
    assert set(block_keys(cache_salt="a")).isdisjoint(block_keys(cache_salt="b"))
    assert block_keys(temperature=0.5, max_tokens=9, stream=True, seed=3, n=2) == block_keys()
