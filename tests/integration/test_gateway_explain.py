"""Diagnostics of past requests: one request in `argosy explain`, all of them in `/metrics`."""

from __future__ import annotations

import asyncio
import io
import subprocess

import msgspec
import pytest
from rich.console import Console
from tests.integration.test_metrics import value
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import run_gateway
from tests.support.services import find_program

from argosy.cli.explain import print_explanation, timeline_steps
from argosy.deployment import ExplainConfig, ReplicaConfig
from argosy.gateway.principal import Principal
from argosy.gateway.request_explainer import explain_record
from argosy.gateway.request_trace import (
    CostTrace,
    IdempotencyTrace,
    LimitTrace,
    RequestTrace,
    TraceStore,
)
from argosy.policy import Rates, RoutingCost
from argosy.policy.placement import AttemptRecord
from argosy.protocol import TokenUsage
from argosy.store import UsageRecord

BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


async def send_500(request: UpstreamRequest) -> None:
    request.send_json(500, {"error": {"message": "out of order"}})


async def test_retried_request_has_two_attempts_in_trace_and_metrics_that_pass_promtool() -> None:
    async with (
        fake_upstream(send_500) as one,
        fake_upstream() as two,
        run_gateway(
            [],
            ReplicaConfig(url=one.url, kind="openai"),
            ReplicaConfig(url=two.url, kind="openai"),
        ) as running,
    ):
        explanations = []
        for number in range(2):
            headers = {"x-request-id": f"mine-{number}"}
            answer = await running.client.post(
                "/v1/completions", json=BODY | {"stream": True}, headers=headers
            )
            assert answer.headers["x-request-id"] == f"mine-{number}"
            trace = running.traces.find(f"mine-{number}")
            assert trace is not None
            explanations.append(trace.to_dict())
        text = (await running.client.get("/metrics")).text
    retried = max(explanations, key=lambda each: len(each["attempts"]))
    failed, answered = retried["attempts"]
    assert (failed["replica"], failed["outcome"]) == (one.url, "failure")
    assert failed["reason"] == "status 500"
    assert (answered["replica"], answered["outcome"]) == (two.url, "success")
    assert {candidate["replica"] for candidate in failed["candidates"]} == {one.url, two.url}
    assert {candidate["replica"] for candidate in answered["candidates"]} == {two.url}
    assert retried["status"] == "completed"
    assert retried["tokens"]["output"] == 3
    ms = retried["ms"]
    assert 0 <= ms["read"] <= ms["admitted"] <= answered["sent_ms"] <= ms["first_token"]
    assert ms["first_token"] <= ms["last_token"] <= ms["ended"]
    assert value(text, "argosy_gateway_requests_total", status="completed", model="big") == 2
    retries = sum(len(each["attempts"]) - 1 for each in explanations)
    assert value(text, "argosy_gateway_retries_total", model="big") == retries
    assert value(text, "argosy_gateway_tokens_total", kind="output") == 6
    assert value(text, "argosy_gateway_time_to_first_token_seconds_count") == 2
    assert value(text, "argosy_gateway_http_requests_total", route="/v1/completions") == 2
    command = [find_program("promtool", "prometheus"), "check", "metrics"]
    done = await asyncio.to_thread(
        subprocess.run, command, input=text.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_trace_store_is_bounded_in_count_and_age() -> None:
    traces = TraceStore(ExplainConfig(max_requests=3, retention_s=10.0))
    for number in range(5):
        trace = RequestTrace(response_id=f"a{number}", request_id="same")
        traces.add(trace)
        traces.complete(trace, float(number))
    assert len(traces) == 3
    assert traces.find("a1") is None
    found = traces.find("same")
    assert found is not None
    assert found.response_id == "a4"
    other = RequestTrace(response_id="b", principal=Principal(organisation="quiet"))
    for trace in (other, *(RequestTrace(response_id=f"c{number}") for number in range(5))):
        traces.complete(trace, 5.0)
    assert traces.find("b") == other  # the tenant with the most traces loses its oldest
    late = RequestTrace(response_id="late", request_id="other")
    traces.add(late)
    traces.complete(late, 100.0)
    assert len(traces) == 1
    assert traces.find("same") is None


def test_response_id_takes_precedence_over_equal_request_id() -> None:
    traces = TraceStore(ExplainConfig())
    first, other = (
        RequestTrace(response_id="chatcmpl-1", request_id="a"),
        RequestTrace(response_id="chatcmpl-2", request_id="chatcmpl-1"),
    )
    for trace in (first, other):
        traces.add(trace)
        assert traces.find("chatcmpl-1") is first
    for trace in (first, other):
        traces.complete(trace, 1.0)
    assert traces.find("chatcmpl-1") == first


def test_equal_request_ids_are_separate_per_organisation() -> None:
    traces = TraceStore(ExplainConfig(max_requests=2))
    for number, organisation in enumerate(("acme", "zeta")):
        trace = RequestTrace(
            response_id=f"a{number}",
            request_id="same",
            principal=Principal(organisation=organisation),
        )
        traces.add(trace)
        traces.complete(trace, float(number))
    found = [traces.find("same", organisation) for organisation in ("acme", "zeta", None, "other")]
    assert [trace and trace.response_id for trace in found] == ["a0", "a1", "a1", None]
    for number in (2, 3):
        trace = RequestTrace(response_id=f"a{number}", request_id="other")
        traces.add(trace)
        traces.complete(trace, float(number))
    assert traces.find("same", "acme") is None


def test_completed_trace_keeps_all_fields() -> None:
    costs = (RoutingCost("http://a", 0.1, 0.2, 0.3, 0.0, 0.0),)
    trace = RequestTrace(
        response_id="cmpl-1",
        principal=Principal(key="k", allowed_models=frozenset({"big"})),
        attempts=[AttemptRecord("http://a", 1.2, 0, costs, 1.2, 1.3, 1.5, "success")],
        finish_reasons={0: "stop"},
        limits=[LimitTrace("key", "tokens", "minute", None, 100, 0, 5, None)],
        tokens=TokenUsage(5),
        cost=CostTrace(15, Rates(3, 1, 5)),
    )
    encoded = msgspec.json.encode(trace.to_dict())
    assert msgspec.json.decode(encoded)["limits"][0]["asked"] == 5
    assert msgspec.json.decode(encoded)["ledger"]["rates"]["output"] == 5
    traces = TraceStore(ExplainConfig())
    traces.complete(trace, 1.0)
    kept = traces.find("cmpl-1")
    assert kept is not None
    assert kept is not trace
    assert msgspec.json.encode(kept.to_dict()) == encoded


def test_terminal_shows_steps_candidates_and_filter_traces() -> None:
    costs = tuple(RoutingCost(name, 0.1, 0.2, 0.3, 0.0, 0.0) for name in ("http://a", "http://b"))
    trace = RequestTrace(
        response_id="cmpl-1",
        model="big",
        path="/v1/completions",
        stream=True,
        arrived_at=1.0,
        parsed_at=1.001,
        admitted_at=1.002,
        queued_at=1.002,
        queued_ahead=4,
        first_token_at=1.6,
        last_token_at=2.0,
        ended_at=2.0,
        routing_policy="least-cost",
        attempts=[
            AttemptRecord(
                "http://a", 1.2, 0, costs, 1.2, 1.3, 1.5, "failure", "the replica closed"
            ),
            AttemptRecord("http://b", 1.55, 7, costs[1:], 1.56, 1.6, 2.0, "success"),
            AttemptRecord(
                "http://c", 1.57, sent_at=1.57, ended_at=1.6, outcome="ended", is_hedge=True
            ),
        ],
        status="completed",
        finish_reasons={0: "stop", 1: "length"},
        stop_reasons={1: "limit"},
        idempotency=IdempotencyTrace("again", "cmpl-0"),
    )
    text = render(trace, 160)
    for part in (
        *(
            "cmpl-1",
            "completed",
            "queue, 4 ahead",
            "the replica closed",
            "resumed after 7",
            "c, hedge",
            "finished by length (limit), stop",
        ),
        *("Attempt 1", "http://b", "0.6000", "idempotency", "again", "cmpl-0"),
    ):
        assert part in text


def test_terminal_shows_what_the_ledger_knows() -> None:
    record = UsageRecord(
        request="cmpl-ab12cd34ffff",
        project="shop",
        key="key_1",
        model="big",
        replica="one",
        started_at=1_800_000_000.0,
        ended_at=1_800_000_061.5,
        status="completed",
        input_tokens=7,
        output_tokens=3,
        nano_dollars=1_500_000,
    )
    console = Console(record=True, width=120, file=io.StringIO())
    print_explanation(console, explain_record(record, "ab12cd34"))
    text = console.export_text()
    for part in (
        *("cmpl-ab12cd34ffff", "completed", "big", "7 prompt tokens", "3 output", "61500 ms"),
        *("tenant shop, key key_1", "The gateway ab12cd34 is gone", "$0.0015", "one"),
    ):
        assert part in text


def test_terminal_output_replaces_control_characters() -> None:
    control_sequence = "\x1b]0;mine\x07"
    failed = AttemptRecord("a", 1.2, ended_at=1.3, outcome="failure", reason=control_sequence)
    text = render(
        RequestTrace(ended_at=2.0, attempts=[failed], finish_reasons={0: control_sequence}), 160
    )
    assert "\x1b" not in text
    assert text.count("\ufffd]0;mine\ufffd") == 2


def test_terminal_shows_limits_and_cost() -> None:
    trace = RequestTrace(
        ended_at=2.0,
        limits=[
            LimitTrace("organisation", "nano_dollars", "month", None, 10**18, 1_265 * 10**9, 42),
            LimitTrace("key", "tokens", "minute", "big", 1_000_000, 7, 12_345, 3.21, fits=False),
            LimitTrace("key", "tokens", "day", None, 5, 0, 9, None, fits=False),
            LimitTrace("user", "concurrency", "", None, 2, 2, 1, 0.0, fits=False),
        ],
        tokens=TokenUsage(1_105, 5, 70),
        cost=CostTrace(3_702, Rates(3, 1, 5)),
    )
    lines = [" ".join(line.split()) for line in render(trace, 100).splitlines()]
    for line in (
        "organisation dollars per month $1,000,000,000.00 $1,265.00 $0.000000042 yes",
        "key tokens per minute for big 1,000,000 7 12,345 in 3.2 s",
        "key tokens per day 5 0 9 never",
        "user concurrency 2 2 1 no",
    ):
        assert line in lines
    priced = "1,100 input at $0.003 + 5 cached at $0.001 + 70 output at $0.005 per million tokens"
    assert f"ledger: $0.000003702 = {priced}" in " ".join(lines)


def render(trace: RequestTrace, columns: int) -> str:
    """Return the explanation as a terminal of this width shows it."""
    console = Console(record=True, width=columns, file=io.StringIO())
    print_explanation(console, trace.to_dict())
    return console.export_text()


def test_long_failure_reason_is_truncated_with_ellipsis() -> None:
    closed = "the replica closed the connection (before the end)"
    attempts = [
        AttemptRecord("a", 1.2, ended_at=1.3, outcome="failure", reason=closed),
        AttemptRecord("b", 1.4, ended_at=1.5, outcome="failure", reason="x" * 300),
    ]
    short, truncated = [
        step.name
        for step in timeline_steps(RequestTrace(ended_at=2.0, attempts=attempts).to_dict())
        if step.style == "red"
    ]
    assert short == f"a: failure ({closed})"
    assert truncated.endswith("x…)")
    assert len(truncated) < 150


@pytest.mark.parametrize("last", ["success", "failure", "ended", "none", "refused"])
def test_timeline_steps_cover_whole_request(last: str) -> None:
    attempts = [
        AttemptRecord("http://a", 1.2, 0, (), 1.2, 1.3, 1.5, "failure", "the replica closed"),
        AttemptRecord("http://b", 2.5, 7, (), 2.5, None, 2.6, "backpressure", "status 429"),
        AttemptRecord("http://c", 2.55, 7, (), 2.56, 2.58, 2.8, last, is_hedge=True),
    ]
    trace = RequestTrace(
        arrived_at=1.0,
        parsed_at=1.1,
        admitted_at=1.15,
        queued_at=1.15,
        ended_at=3.4,
        attempts=attempts,
    )
    if last == "none":
        trace.attempts = []
    if last == "refused":
        trace.attempts, trace.admitted_at, trace.queued_at = [], None, None
    covered = 0.0
    for step in timeline_steps(trace.to_dict()):
        assert step.begin_ms <= covered, step
        covered = max(covered, step.end_ms)
    assert covered == 2400.0
