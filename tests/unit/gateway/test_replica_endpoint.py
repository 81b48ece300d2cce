"""A replica's estimates of waiting tokens and of cached prompts, its arithmetic, decisions of operators, and gauges."""

from __future__ import annotations

import math

import pytest
from tests.support.load_reports import load_report

from argosy.deployment import BackendKind
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.series_collector import UNKNOWN_ENGINE, EngineGauges
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    ReplicaStatus,
    StatusChange,
    compute_prefix_keys,
)
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
            phase_s_total=phases,
        )
        replica.on_native_load(report, at)
        gauges.begin()
        return list(gauges.read(replica))

    unknown = math.nan
    assert gauges.read(replica) == UNKNOWN_ENGINE, "it has not reported yet"
    for reading, expected in (
        (read(10.0, 100, 4, 1.0), [unknown, unknown, unknown]),
        (read(12.0, 120, 7, 1.4), [1.5, 0.001, 0.02]),
        (read(13.0, 120, 7, 1.4), [0.0, unknown, unknown]),
        (read(14.0, 3, 0, 0.1), [unknown, unknown, unknown]),
        (read(15.0, 4, 0, 0.2), [0.0, 0.001, 0.1]),
    ):
        blocks, (preemptions, plan_s, launch_s, compute_s, *_) = reading[:2], reading[2:]
        assert blocks == [5, 3]
        assert math.isnan(launch_s), "a phase that is not reported"
        assert [preemptions, plan_s, compute_s] == pytest.approx(expected, nan_ok=True)
