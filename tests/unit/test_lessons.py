"""Lessons of the console: what their frames show holds for all parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.lessons import LESSONS
from argosy.policy import QUANTUM_TOKENS

BY_NAME = {lesson.name: lesson for lesson in LESSONS}
lesson_runs = settings(max_examples=25, deadline=None)


def run_lesson(name: str, **values: int) -> dict[str, Any]:
    """Run a lesson as its endpoint does, and return the response."""
    lesson = BY_NAME[name]
    parsed: Any = msgspec.convert(values, lesson.parameters)
    response: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(lesson.run(parsed)))
    return response


def parameters(name: str) -> st.SearchStrategy[dict[str, int]]:
    """Draw values within the bounds that the lesson names."""
    return st.fixed_dictionaries(
        {
            one["name"]: st.integers(
                -(-one["minimum"] // one["step"]), one["maximum"] // one["step"]
            ).map(one["step"].__mul__)
            for one in run_lesson(name)["parameters"]
        }
    )


@lesson_runs
@given(parameters("kv-blocks"))
def test_blocks_are_free_cached_or_used_and_all_requests_end(values: dict[str, int]) -> None:
    frames = run_lesson("kv-blocks", **values)["frames"]
    for frame in frames:
        used = {block for block, owners in enumerate(frame["owners"]) if owners}
        assert len(frame["owners"]) == values["blocks"]
        assert used.isdisjoint(frame["cached"])
        holders = {number for owners in frame["owners"] for number in owners}
        running = {one["number"] for one in frame["requests"] if one["state"] == "running"}
        assert holders == running
        shared = sum(len(owners) > 1 for owners in frame["owners"])
        assert shared <= values["shared_blocks"]
    assert frames[-1]["text"].endswith("gives the blocks back.")
    ended = {one["number"] for one in frames[-1]["requests"]}
    assert ended == set(range(1, values["requests"] + 1))


@lesson_runs
@given(parameters("batching"))
def test_continuous_batching_leaves_no_place_empty_while_requests_wait(
    values: dict[str, int],
) -> None:
    frames = run_lesson("batching", **values)["frames"]
    for policy in ("static", "continuous"):
        ended = [number for frame in frames for number in frame[policy]["ended"]]
        assert sorted(ended) == list(range(1, values["requests"] + 1)), policy
    for before, frame in pairwise(frames):
        lane = frame["continuous"]
        assert not lane["waiting"] or 0 not in lane["slots"]
        old, new = set(before["static"]["slots"]) - {0}, set(frame["static"]["slots"]) - {0}
        joined, ended_before = new - old, set(before["static"]["ended"])
        assert not joined or old <= ended_before, "static batches do not overlap"


@lesson_runs
@given(parameters("fair-queue"))
def test_tenants_share_by_weight_within_the_bound(values: dict[str, int]) -> None:
    frames = run_lesson("fair-queue", **values)["frames"]
    bound = 2 * QUANTUM_TOKENS + values["flood_cost"] + 200
    for frame in frames:
        if frame["waiting"][0] and frame["waiting"][1]:  # both have waited since the first frame
            a, b, _ = frame["served_tokens"]
            assert abs(a - b / values["weight"]) <= bound
    assert frames[-1]["served_tokens"] == frames[-1]["fifo_served_tokens"]
    assert frames[-1]["served_tokens"][0] == values["flood"] * values["flood_cost"]


@lesson_runs
@given(parameters("limits"))
def test_window_and_budget_hold_and_the_bucket_follows_its_formula(values: dict[str, int]) -> None:
    frames = run_lesson("limits", **values)["frames"]
    limit, used = values["limit_tokens"], 100 + 4 * values["used_percent"]
    for frame in frames:
        assert 0 <= frame["window_tokens"] <= limit
        assert 0 <= frame["budget_tokens"] <= values["budget_tokens"]
        assert (frame["outcome"] is not None) == (frame["second"] % values["interval_s"] == 0)
    for before, frame in pairwise(frames):
        refilled = min(limit, before["bucket_tokens"] + limit / 60)
        taken = used if frame["bucket_outcome"] == "admitted" else 0
        assert frame["bucket_tokens"] == pytest.approx(refilled - taken)
        assert frame["bucket_outcome"] != "rejected" or used > refilled


@lesson_runs
@given(parameters("circuit-breaker"))
def test_half_of_the_pool_stays_eligible_and_open_breakers_get_no_requests(
    values: dict[str, int],
) -> None:
    frames = run_lesson("circuit-breaker", **values)["frames"]
    for before, frame in pairwise(frames):
        replicas = frame["replicas"]
        assert sum(one["is_eligible"] for one in replicas) >= len(replicas) / 2
        for old, new in zip(before["replicas"], replicas, strict=True):
            if not old["is_eligible"] and not new["is_eligible"] and old["open_s"] > 0.5:
                assert new["sent"] == old["sent"]
            assert new["open_s"] is None or new["open_s"] <= 10
    failed = sum(one["failed"] for one in frames[-1]["replicas"])
    assert (failed > 0) == (values["failing"] > 0)
    assert all(one["sent"] for one in frames[-1]["replicas"])


def test_replica_returns_after_the_probe_that_succeeds() -> None:
    values = {"failing": 1, "outage_s": 5, "consecutive_failures": 3, "base_open_s": 2}
    frames = run_lesson("circuit-breaker", **values)["frames"]
    changes = {frame["at_s"]: frame["text"] for frame in frames if "breaker" in frame["text"]}
    assert [(at, text) for at, text in changes.items() if text.startswith(("r1", "The probe"))] == [
        (4.0, "r1 has failed too often, so its breaker opens for 2 s."),
        (6.0, "The probe of r1 fails, so its breaker stays open for 4 s."),
        (10.0, "The probe of r1 succeeds, so its breaker closes."),
    ]


@pytest.mark.parametrize("name", BY_NAME)
def test_parameters_out_of_bounds_are_rejected(name: str) -> None:
    for one in run_lesson(name)["parameters"]:
        for value in (one["minimum"] - one["step"], one["maximum"] + one["step"]):
            with pytest.raises(msgspec.ValidationError):
                run_lesson(name, **{one["name"]: value})
