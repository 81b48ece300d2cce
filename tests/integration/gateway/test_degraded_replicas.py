"""Replicas that fail often or are full: who gets their requests, within which budget, and when they get some again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from email.utils import formatdate

import pytest
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    UpstreamScript,
    build_response,
    fake_upstream,
    hang,
    listening,
    reset_connection,
    respond_429,
    respond_500,
    respond_with_tokens,
)
from tests.support.gateway_harness import (
    FAST_TIMEOUTS,
    GatewayHarness,
    RecordingFilter,
    open_breaker,
    run_gateway,
)
from tests.support.replica_servers import MODEL, completion, serve

from argosy.deployment import BackendKind, ReplicaConfig, Timeouts
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.request_context import RequestFilter
from argosy.policy import ReplicaStatus, RetryBudget, health_check, retries

PATH = "/v1/completions"


@contextlib.asynccontextmanager
async def gateway_with(
    *scripts: UpstreamScript,
    kind: BackendKind = "openai",
    timeouts: Timeouts = FAST_TIMEOUTS,
    max_requests: int = 256,
    filters: Sequence[RequestFilter] = (),
) -> AsyncIterator[tuple[GatewayHarness, Sequence[FakeUpstream]]]:
    """Run a gateway in front of upstreams with these scripts."""
    upstreams = [FakeUpstream(script) for script in scripts]
    async with listening(*upstreams):
        configs = [
            ReplicaConfig(url=upstream.url, kind=kind, model="rough", max_requests=max_requests)
            for upstream in upstreams
        ]
        async with run_gateway(filters, *configs, timeouts=timeouts) as gateway:
            yield gateway, upstreams


async def send(gateway: GatewayHarness, tokens: int = 3, prompt: str = "Once") -> tuple[int, str]:
    """Send a streaming request and return status and content of the response."""
    body = completion(prompt, model="big", max_tokens=tokens, stream=True)
    response = await gateway.client.post(PATH, json=body)
    return response.status_code, response.text


# --- retry budget --------------------------------------------------------------------------------


async def test_failover_to_healthy_replica_needs_no_retry_budget() -> None:
    async def reset_when_other_accepts(request: UpstreamRequest) -> None:
        gateway.replicas[1].health.on_detected(0.0)
        await reset_connection(request)

    async with gateway_with(reset_when_other_accepts, respond_with_tokens) as (gateway, upstreams):
        failing, healthy = gateway.replicas
        open_breaker(failing)
        healthy.health.on_report_required()
        (pool,) = gateway.models.pools
        pool.retry_budget = RetryBudget(ratio=0.0, reserve=0.0)
        assert (await send(gateway))[0] == 200
        assert len(upstreams[1].requests) == 1


# --- requests that replicas fail with ------------------------------------------------------------


async def test_poison_request_gets_fewer_attempts_when_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retries, "REJECTION_S", 0.3)
    recovered = asyncio.Event()

    async def reset_on_poison(request: UpstreamRequest) -> None:
        is_poison = request.body["prompt"] == "Once" and not recovered.is_set()
        await (reset_connection if is_poison else respond_with_tokens)(request)

    recorder = RecordingFilter()

    def attempts() -> int:
        return sum(len(context.trace.attempts) for context in recorder.started)

    async with gateway_with(*[reset_on_poison] * 6, filters=[recorder]) as (gateway, _):
        for _ in range(2):
            status, content = await send(gateway)
            assert (status, attempts()) == (502, 4)
            assert "Change it, or try again in" in json.loads(content)["error"]["message"]
        assert (await send(gateway, prompt="Twice"))[0] == 200
        while attempts() == 5:
            assert (await send(gateway))[0] == 502
        assert attempts() == 6
        recovered.set()
        while (await send(gateway))[0] == 502:
            assert attempts() == 6
        assert (await send(gateway))[0] == 200
    assert len(recorder.started[-1].pool.poison_requests) == 0


async def test_request_that_crashes_replicas_crashes_at_most_four() -> None:
    """A reset of a reused connection is retried for free, but not if the replica no longer listens."""
    upstreams: list[FakeUpstream] = []

    def crash_on(upstream: FakeUpstream) -> UpstreamScript:
        async def crash(request: UpstreamRequest) -> None:
            del request
            upstream.crash()

        return crash

    for _ in range(6):
        upstream = FakeUpstream()
        upstream.script = crash_on(upstream)
        upstreams.append(upstream)
    async with listening(*upstreams):
        configs = [ReplicaConfig(url=upstream.url, kind="vllm") for upstream in upstreams]
        async with run_gateway([], *configs) as gateway:
            status, _ = await send(gateway)
    assert (status, sum(len(upstream.requests) for upstream in upstreams)) == (502, 4)


# --- full replicas -------------------------------------------------------------------------------


def full_for(retry_after: str) -> UpstreamScript:
    """Return a script that rejects with this `Retry-After`."""

    async def reject(request: UpstreamRequest) -> None:
        response = build_response(b"{}", None, 429, f"retry-after: {retry_after}")
        request.writer.write(response)

    return reject


@pytest.mark.parametrize(
    ("retry_after", "min_s", "max_s"),
    [
        ("40", 20, 41),
        ("40.5", 20, 41),
        (45, 10, 46),
        (86_400, 50, 61),
        (-86_400, 0, 10),
        ("100000000000", 50, 61),
        ("-1", 0, 10),
        ("nan", 0, 10),
        ("in a while", 0, 10),
        ("Sun, 06 Nov 99999 08:49:37 GMT", 0, 10),
    ],
)
async def test_retry_after_header_sets_backoff(
    retry_after: str | int, min_s: float, max_s: float
) -> None:
    if isinstance(retry_after, int):  # seconds from now, sent as a date
        retry_after = formatdate(time.time() + retry_after, usegmt=True)
    async with gateway_with(full_for(retry_after), timeouts=Timeouts(failover_timeout_s=0.1)) as (
        gateway,
        _,
    ):
        before = time.monotonic()
        assert (await send(gateway))[0] == 429
        after, (replica,) = time.monotonic(), gateway.replicas
        assert replica.health.status(before + min_s) is ReplicaStatus.BACKOFF or not min_s
        assert replica.health.status(after + max_s) is ReplicaStatus.READY


async def test_backoff_beyond_failover_timeout_rejects_at_once() -> None:
    async with gateway_with(full_for("1000"), timeouts=Timeouts(failover_timeout_s=600)) as (
        gateway,
        (upstream,),
    ):
        for _ in range(2):  # the request that is rejected, and one during the backoff
            body = completion(model="big", max_tokens=3)
            response = await gateway.client.post(PATH, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
            assert 900 < int(response.headers["retry-after"]) <= 1000
        assert len(upstream.requests) == 1


async def test_request_waits_for_end_of_short_backoff() -> None:
    scripts = iter((full_for("0.1"), respond_with_tokens))

    async def reject_first(request: UpstreamRequest) -> None:
        await next(scripts)(request)

    async with gateway_with(reject_first, timeouts=Timeouts(failover_timeout_s=600)) as (
        gateway,
        (upstream,),
    ):
        assert (await send(gateway))[0] == 200
        assert len(upstream.requests) == 2


# --- probes of ejected replicas ------------------------------------------------------------------


async def respond_404(request: UpstreamRequest) -> None:
    request.send_json(404, {"error": {"message": "no chats here"}})


@pytest.mark.parametrize(
    ("script", "closes"),
    [
        (respond_500, False),
        (hang, False),
        (respond_with_tokens, True),
        (respond_429, True),
        (respond_404, True),
    ],
)
async def test_breaker_closes_only_after_a_generation(
    monkeypatch: pytest.MonkeyPatch, script: UpstreamScript, closes: bool
) -> None:
    """A replica whose pages respond may still be unable to generate."""
    if not closes:
        monkeypatch.setattr(health_check, "TEST_GENERATION_TIMEOUT_S", 0.1)
    async with fake_upstream() as upstream:
        config = ReplicaConfig(url=upstream.url, kind="openai")
        async with run_gateway([], config) as gateway:
            (replica,) = gateway.replicas
            open_breaker(replica)
            upstream.probe_script = upstream.script = script
            await gateway.probe()
            assert replica.health.breaker.is_closed == closes


class ReportingAfterRestart(LlamaCpp):
    """Server that reports its load only after a restart."""

    has_restarted: bool = False

    def load_pages(self) -> dict[str, object]:
        return super().load_pages() if self.has_restarted else {}


async def test_replica_is_detected_again_after_breaker_closes() -> None:
    backend = ReportingAfterRestart()
    async with (
        listening(backend),
        run_gateway([], ReplicaConfig(url=backend.url, model="cat")) as gateway,
    ):
        (replica,) = gateway.replicas
        max_seqs = []
        for failed in (False, False, True):  # a replica without failures is not detected again
            if failed:
                open_breaker(replica)
            await gateway.probe()
            max_seqs.append(replica.load.max_seqs)
            backend.has_restarted = True
        assert max_seqs == [0, 0, 4]


async def test_native_replica_is_probed_with_one_token(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, lambda _: Script([100, 101]))
    async with (
        serve(engine) as served,
        run_gateway([], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        (replica,) = gateway.replicas
        await gateway.probe()
        assert not engine.requests  # a replica without failures gets no test generation
        open_breaker(replica)
        await gateway.probe()
        assert replica.health.breaker.is_closed
    (request,) = engine.requests
    assert request.params.max_tokens == 1
