"""Limits on what a replica's responses and load reports may cost the gateway and its clients.

`test_upstream_conformance` has the table of what single misbehaviours cost.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable

import pytest
from structlog.testing import capture_logs
from tests.support.fake_backend import sse
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    build_response,
    build_stream,
    fake_upstream,
    listening,
    respond_with,
    respond_with_text,
)
from tests.support.gateway_client import BODIES, CHAT, COMPLETION
from tests.support.gateway_harness import GatewayHarness, run_gateway

from argosy.deployment import BackendKind, ReplicaConfig
from argosy.gateway.backends import stream_events
from argosy.gateway.pool.prober import MAX_LOAD_REPORT_BYTES
from argosy.gateway.upstream import upstream_response
from argosy.gateway.upstream.upstream_response import MAX_FETCHED_BYTES

BODY = BODIES[CHAT]
STREAM = BODY | {"stream": True}


@contextlib.asynccontextmanager
async def raw_upstream(
    raw_response: Callable[[str], bytes], kind: BackendKind = "vllm"
) -> AsyncIterator[GatewayHarness]:
    """Run a gateway in front of a replica that sends `raw_response` of each path."""
    upstream = FakeUpstream(raw_response=raw_response)
    async with listening(upstream):
        config = ReplicaConfig(url=upstream.url, name="bad", kind=kind)
        async with run_gateway([], config) as running:
            yield running


def only_at(path: str, response: bytes) -> Callable[[str], bytes]:
    """Return the response at one path and an empty object at all others."""
    return lambda requested: response if requested == path else build_response(b"{}")


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(
    ("content_type", "forwarded"),
    [
        ("text/html", "text/plain"),
        ("TEXT/HTML; a=b", "text/plain"),
        ("image/svg+xml", "text/plain"),
        ("", "text/plain"),
        ("nonsense", "text/plain"),
        ("application/json", "application/json"),
        (METRICS_TYPE, METRICS_TYPE),
    ],
)
async def test_content_type_of_page_becomes_plain_text(content_type: str, forwarded: str) -> None:
    """A page would run scripts in the gateway's origin, with the rights of a local administrator."""
    page = build_response(b"<script>fetch('/admin/keys')</script>", content_type, 403)
    async with raw_upstream(lambda _: page) as running:
        response = await running.client.post(CHAT, json=BODY)
        metrics = await running.client.get("/replicas/bad/metrics")
    assert response.headers["content-type"] == metrics.headers["content-type"] == forwarded


OVERSIZED = build_response(json.dumps({"choices": []}).ljust(1 << 17).encode())
SHORT_BODY = {"model": "big", "prompt": "Once", "max_tokens": 3}
LONG_BODY = SHORT_BODY | {"prompt": "All"}


async def respond_oversized(request: UpstreamRequest) -> None:
    """Send more than the limit for one of the prompts."""
    is_long = request.body["prompt"] == "All"
    await (respond_with(OVERSIZED) if is_long else respond_with_text)(request)


async def test_oversized_responses_do_not_eject_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log probabilities of a long prompt are an example."""
    monkeypatch.setattr(upstream_response, "MAX_BUFFERED_BYTES", 1 << 16)
    async with fake_upstream(respond_oversized) as one, fake_upstream(respond_oversized) as two:
        configs = [ReplicaConfig(url=each.url, kind="openai") for each in (one, two)]
        async with run_gateway([], *configs) as running:
            for _ in range(4):
                response = await running.client.post(COMPLETION, json=LONG_BODY)
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "request_too_large"
            assert len(one.requests) + len(two.requests) == 8  # another may have a shorter response
            for _ in range(2):
                response = await running.client.post(COMPLETION, json=SHORT_BODY)
                assert response.status_code == 200
            assert len(one.requests) == len(two.requests) == 5


async def test_oversized_response_fails_over_to_shorter_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_response, "MAX_BUFFERED_BYTES", 1 << 16)
    async with fake_upstream(respond_oversized) as bad, fake_upstream() as good:
        configs = [ReplicaConfig(url=each.url, kind="openai") for each in (bad, good)]
        async with run_gateway([], *configs) as running:
            for _ in range(4):
                response = await running.client.post(COMPLETION, json=LONG_BODY)
                assert response.status_code == 200
            assert bad.requests


@pytest.mark.parametrize("status", [401, 402, 429, 500])
async def test_error_message_of_replica_is_logged_and_not_forwarded(status: int) -> None:
    message = "You exceeded your quota, org-1"
    error = build_response(json.dumps({"error": {"message": message}}).encode(), None, status)
    async with raw_upstream(only_at(COMPLETION, error), "openai") as running:
        with capture_logs() as logs:
            response = await running.client.post(COMPLETION, json=BODIES[COMPLETION])
        failures = [line for line in logs if line["event"] == "attempt_failed"]
        assert {line.get("upstream_message") for line in failures} == {message}
        trace = running.traces.find(response.headers["x-argosy-request"])
        assert trace is not None
        assert f"status {status}" in str(trace.to_dict())
        assert message not in str(trace.to_dict()) + response.text


LONG = "x" * 100_000


@pytest.mark.parametrize(
    "event",
    [
        {
            "choices": [
                {"index": number, "text": "a", "finish_reason": LONG[:99]}
                for number in range(5_000)
            ]
        },
        {"choices": [{"index": 0, "delta": {}, "finish_reason": LONG}]},
        {"choices": [{"index": 0, "delta": {LONG: 1}, "logprobs": 1}]},
        {"error": {"message": LONG}},
    ],
    ids=["many-choices", "finish-reason", "field-name", "error-message"],
)
async def test_trace_stays_small_for_any_stream(event: dict[str, object]) -> None:
    stream = build_stream(sse(event), b"data: [DONE]\n\n")
    async with raw_upstream(lambda _: stream) as running:
        response = await running.client.post(CHAT, json=STREAM | {"n": 2})
        trace = running.traces.find(response.headers["x-argosy-request"])
    assert trace is not None
    assert len(str(trace.to_dict())) < 20_000


async def test_native_stream_with_too_many_objects_is_named_in_trace() -> None:
    event = b'data: {"id":"x","created":1,"model":"m","choices":[],"x":[%b{}]}\n\n'
    objects = b"{}," * stream_events.MAX_JSON_CONTAINERS
    stream = build_stream(event % objects + b": argosy prompt 1 0\n\n")
    async with raw_upstream(only_at(CHAT, stream), "argosy") as running:
        running.replicas[0].health.on_reported_state("ready", 0.0)
        response = await running.client.post(CHAT, json=BODY)
        trace = running.traces.find(response.headers["x-argosy-request"])
    assert trace is not None
    assert "objects" in trace.attempts[0].reason


async def test_native_stream_with_gap_ends_with_error_before_gap() -> None:
    chunk = '"created": 1, "model": "m", "choices": [{"index": 0, "delta": {"content": "%s"}}]'
    chunks = [b'data: {"id": "x", %b}\n\n' % (chunk % text).encode() for text in "ab"]
    stream = build_stream(
        b": argosy prompt 7 3\n\n" + chunks[0] + b": argosy 0 1\n\n",
        b": argosy 0 x\n\n",
        chunks[1] + b": argosy 0 3\n\n",
        b"data: [DONE]\n\n",
    )
    async with raw_upstream(only_at(CHAT, stream), "argosy") as running:
        running.replicas[0].health.on_reported_state("ready", 0.0)
        response = await running.client.post(CHAT, json=STREAM)
    assert b"upstream_failed" in response.content
    assert b'"a"' in response.content
    assert b'"b"' not in response.content


# --- load reports --------------------------------------------------------------------------------

HUGE = b"1" + b"0" * 400
NATIVE_LOAD = (
    b'{"server_load": 0, "state": "ready", "models": ["big"], "running": 0, "waiting": %b, '
    b'"queued_tokens": %b, "max_seqs": %b, "max_model_len": 8192, "block_size": 16, "kv_blocks_total": %b, '
    b'"kv_blocks_used": 0, "kv_blocks_cached": 0, "step": 1, "step_s": 0.1}'
)


@pytest.mark.parametrize(
    "values",
    [
        (HUGE, b"0", b"1", b"9"),
        (b"0", HUGE, b"1", b"9"),
        (b"0", b"0", HUGE, b"9"),
        (b"0", b"0", b"-1", b"9"),
        (b"0", b"0", b"1", HUGE),
    ],
    ids=["waiting", "queued-tokens", "max-seqs", "negative-max-seqs", "kv-blocks"],
)
async def test_impossible_native_load_report_is_ignored(values: tuple[bytes, ...]) -> None:
    load = build_response(NATIVE_LOAD % values)
    async with raw_upstream(only_at("/load", load), "argosy") as running:
        assert running.replicas[0].load.reported_at < 0
        assert (await running.client.post(CHAT, json=BODY)).status_code == 502


async def test_replica_that_reports_inexact_results_is_not_resumed() -> None:
    load = (NATIVE_LOAD % (b"0", b"0", b"1", b"9"))[:-1] + b', "exact": false}'
    async with raw_upstream(only_at("/load", build_response(load)), "argosy") as running:
        replica = running.replicas[0]
        assert replica.load.reported_at > 0
        assert not replica.adapter.token_id_paths


@pytest.mark.parametrize(
    ("kind", "path", "report"),
    [
        (
            "vllm",
            "/metrics",
            b"".join(b'vllm:num_requests_running{engine="%d"} 1e308\n' % n for n in range(2)),
        ),
        (
            "vllm",
            "/metrics",
            b"vllm:num_requests_running{} 9\nvllm:num_requests_waiting{} 9\n".ljust(
                MAX_LOAD_REPORT_BYTES + 1, b"\n"
            ),
        ),
        (
            "sglang",
            "/v1/loads",
            b'{"loads": [{"num_waiting_reqs": %b, "max_running_requests": -1}]}' % HUGE,
        ),
        (
            "tensorrt-llm",
            "/metrics",
            b'[{"numQueuedRequests": %b, "maxNumActiveRequests": -1}]' % HUGE,
        ),
    ],
    ids=["vllm-infinite-sum", "vllm-too-long", "sglang-huge", "tensorrt-llm-huge"],
)
async def test_impossible_load_report_is_ignored_and_replica_stays_in_use(
    kind: BackendKind, path: str, report: bytes
) -> None:
    """Reading sixty megabytes of lines would block the gateway for twenty seconds, at every probe."""
    load = build_response(report, "text/plain")
    async with raw_upstream(only_at(path, load), kind) as running:
        await running.probe()
        await running.probe()
        assert running.replicas[0].load.running == 0
        assert (await running.client.get("/ready")).is_success
        assert (await running.client.post(CHAT, json=BODY)).is_success


async def test_too_long_model_list_is_ignored() -> None:
    cards = b'{"data": [%b{"id": "big"}]}' % (b"{}," * (MAX_FETCHED_BYTES // 3))
    async with raw_upstream(only_at("/v1/models", build_response(cards))) as running:
        assert not (await running.client.get("/ready")).is_success


@pytest.mark.parametrize("kind", ["argosy", "vllm"])
async def test_pages_that_are_not_utf8_do_not_fail_probe(kind: BackendKind) -> None:
    page = build_response(b'{"state": "\xff", "models": ["\xff"], "data": [{"id": "\xff"}]}')
    async with raw_upstream(lambda _: page, kind) as running:
        await running.probe()
