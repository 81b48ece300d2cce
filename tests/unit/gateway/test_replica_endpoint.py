"""Replicas of a pool: estimates, arithmetic, decisions of operators, gauges, and the selection of one by a prompt."""

from __future__ import annotations

import math

import msgspec
import pytest
from tests.support.load_reports import load_report
from tests.support.placed_requests import select_replica

from argosy.deployment import BackendKind
from argosy.gateway.pool.placement_requests import compute_block_keys
from argosy.gateway.pool.pool import Pool
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.request_fields import parse_request_fields
from argosy.gateway.series_collector import UNKNOWN_ENGINE, EngineGauges
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    ROUTING_POLICIES,
    AttemptOutcome,
    ReplicaStatus,
    RoutingPolicyName,
    StatusChange,
    compute_prefix_keys,
)
from argosy.policy.placement import Selection
from argosy.policy.placement.pool import MAX_COMPARED_REPLICAS
from argosy.policy.placement.replica import SPEED_MAX_AGE_S
from argosy.protocol import parse_endpoint
from argosy.store import ReplicaSetting, ReplicaState


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


def test_cache_estimate_and_rates_are_dropped_with_the_arithmetic() -> None:
    """Another process runs at the address then, whose cache is empty."""
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1")))
    keys = compute_prefix_keys(b"", b"x" * BLOCK_BYTES * 2, BLOCK_BYTES)
    for arithmetic_id, cached in (("aa", 2), ("aa", 2), ("", 2), ("bb", 0)):
        replica.prefix_index.on_prompt_sent(keys)
        report = load_report(arithmetic_id=arithmetic_id, block_size=16, kv_blocks_total=1000)
        replica.on_native_load(report, 0.0)
        assert len(replica.prefix_index.match_prefix(keys)) == cached
    assert replica.arithmetic_id == "bb"


@pytest.mark.parametrize(
    ("kind", "own", "began", "expected"),
    [
        ("argosy", "aa", "", True),
        ("argosy", "aa", "aa", True),
        ("argosy", "aa", "bb", False),
        ("argosy", "", "aa", True),  # not probed yet: the replica decides
        ("vllm", "", "bf16", False),
        ("vllm", "bf16", "bf16", True),
        ("vllm", "", "", True),
    ],
)
def test_output_continues_only_with_its_arithmetic(
    kind: BackendKind, own: str, began: str, expected: bool
) -> None:
    upstream = Upstream(parse_endpoint("http://localhost:1"))
    replica = ReplicaEndpoint("r", kind, "m", upstream, arithmetic_id=own)
    assert replica.has_arithmetic(began) == expected


def decision(state: ReplicaState, changed_at: float, grace_s: float = 0.0) -> ReplicaSetting:
    return ReplicaSetting(
        id="m/r",
        model="m",
        replica="r",
        state=state,
        grace_s=grace_s,
        changed_at=changed_at,
        changed_by="key:a",
    )


def test_operator_decision_takes_replica_out_of_service_and_back() -> None:
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1")))
    changes: list[StatusChange] = []
    replica.health.on_status_change = changes.append
    replica.health.on_reported_state("ready", 10.0)
    replica.apply_setting(decision("draining", 1000.0, grace_s=30.0), 20.0, 1010.0)
    assert (replica.health.status(20.0), replica.health.is_schedulable) == (
        ReplicaStatus.DRAINING,
        False,
    )
    assert [replica.health.must_move_streams(now) for now in (39.9, 40.0)] == [False, True]
    assert replica.health.grace_ends_at == 50.0
    replica.health.on_reported_state("draining", 21.0)
    replica.apply_setting(decision("active", 1020.0), 30.0, 1020.0)
    assert replica.health.needs_undrain
    replica.health.on_reported_state("ready", 31.0)
    assert (replica.health.status(31.0), replica.health.is_schedulable) == (
        ReplicaStatus.READY,
        True,
    )
    assert [change.status.value for change in changes] == ["ready", "draining", "ready"]


@pytest.mark.parametrize(("age_s", "expected"), [(1.0, True), (3600.0, False)])
def test_only_a_new_decision_ends_a_drain_that_the_gateway_did_not_see_begin(
    age_s: float, expected: bool
) -> None:
    """A replica may drain for another reason when a gateway starts and reads an old decision."""
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1")))
    replica.apply_setting(decision("active", 1000.0), 1.0, 1000.0 + age_s)
    assert replica.health.needs_undrain == expected


def test_rates_cover_the_time_between_two_reports() -> None:
    replica = ReplicaEndpoint("r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1")))
    gauges = EngineGauges()

    def read(at: float, step: int, preemptions: int, compute_s: float) -> list[float]:
        phases = {"plan": 0.001 * step, "compute": compute_s}
        report = load_report(
            step=step,
            kv_blocks_used=5,
            kv_blocks_cached=3,
            preemptions_total=preemptions,
            generation_tokens_total=3 * step,
            draft_tokens_total=4 * step,
            accepted_draft_tokens_total=2 * step,
            draft_saved_s_total=0.25 * step,
            phase_s_total=phases,
        )
        replica.on_native_load(report, at)
        gauges.begin()
        return list(gauges.read(replica))

    unknown = math.nan
    assert gauges.read(replica) == UNKNOWN_ENGINE, "it has not reported yet"
    for reading, expected, saved in (
        (read(10.0, 100, 4, 1.0), [unknown, unknown, unknown], unknown),
        (read(12.0, 120, 7, 1.4), [1.5, 0.001, 0.02], 2.5),
        (read(13.0, 120, 7, 1.4), [0.0, unknown, unknown], unknown),
        (read(14.0, 3, 0, 0.1), [unknown, unknown, unknown], unknown),
        (read(15.0, 4, 0, 0.2), [0.0, 0.001, 0.1], 0.25),
    ):
        blocks, preemptions, drafts = reading[:2], reading[2], reading[3:6]
        plan_s, launch_s, compute_s, *_ = reading[6:]
        assert blocks == [5, 3]
        assert math.isnan(launch_s), "a phase that is not reported"
        assert math.isnan(plan_s) or drafts == [3, 0.5, saved]
        assert [preemptions, plan_s, compute_s] == pytest.approx(expected, nan_ok=True)


# --- selection ------------------------------------------------------------------------------------


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
