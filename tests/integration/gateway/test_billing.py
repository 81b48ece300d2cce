"""Billing over HTTP: usage log, metrics and trace agree on the tokens that a client pays for.

The rules themselves are tested in `tests/unit/policy/test_billing.py`, and how tokens are counted in
`tests/unit/gateway/test_response_relay.py`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import Fault, serve_backends
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PROMPT,
    STREAM,
    run_gateway_before,
    run_metered_gateway,
)
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.filters.usage_recorder import UsageRecorder
from argosy.gateway.proxy import response_writers
from argosy.gateway.request_context import RequestContext, RequestFilter
from argosy.store import UsageLog, UsageRecord

NOTHING = (0, 0, 0, 0)


def billed(record: UsageRecord) -> tuple[int, int, int, int]:
    return record.input_tokens, record.cached_tokens, record.output_tokens, record.nano_dollars


@pytest.mark.parametrize(
    ("timeout_s", "events"), [(None, 1), (0.2, 0)], ids=["disconnect-after-role", "deadline"]
)
async def test_request_without_output_is_free(
    tmp_path: Path, timeout_s: float | None, events: int
) -> None:
    backend = Vllm()
    async with (
        serve_backends(backend),
        run_metered_gateway(tmp_path, backend.url) as metered,
    ):
        backend.faults.append(Fault("stall", events))
        fields = STREAM | ({} if timeout_s is None else {"timeout_s": timeout_s})
        task = asyncio.create_task(metered.post(CHATS, **fields))
        if timeout_s is None:
            await until(lambda: backend.requests)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: metered.usage_log.pending_records == 1)
        record = await metered.assert_consistent()
    assert billed(record) == NOTHING
    assert record.status == ("cancelled" if timeout_s is None else "stopped")


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_is_billed_for_delivered_tokens_of_streams_only(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    """The client has received nothing yet of a whole response."""
    engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        run_gateway_before(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as metered,
    ):
        task = asyncio.create_task(metered.post(stream=stream, request_id="mine"))
        await engine.paused.wait()
        trace = metered.running.traces.find("mine")
        assert trace is not None
        await until(lambda: trace.last_token_at is not None)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: metered.usage_log.pending_records == 1)
        record = await metered.assert_consistent()
    assert record.status == "cancelled"
    assert (billed(record) == NOTHING) is not stream


async def test_aggregated_response_ends_at_size_limit(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many choices with log-probabilities used all of the gateway's memory."""
    monkeypatch.setattr(response_writers, "MAX_AGGREGATED_BYTES", 100)
    engine = FakeEngine(tokenizer, constant_script(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        run_gateway_before(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as metered,
    ):
        response = json.loads(await metered.post())
        record = await metered.assert_consistent()
    assert response["choices"][0]["finish_reason"] == "length"
    assert 0 < response["usage"]["completion_tokens"] == record.output_tokens <= 4


@pytest.mark.parametrize(("events", "is_free"), [(1, True), (3, False)])
async def test_failed_stream_is_billed_for_delivered_tokens(
    tmp_path: Path, events: int, is_free: bool
) -> None:
    backend = Vllm()
    async with (
        serve_backends(backend),
        run_metered_gateway(tmp_path, backend.url) as metered,
    ):
        backend.faults.append(Fault("disconnect", events))
        assert "upstream_failed" in await metered.post(CHATS, n=2, **STREAM)
        record = await metered.assert_consistent()
    assert record.status == "failed"
    assert (billed(record) == NOTHING) is is_free


async def test_output_that_a_started_stream_never_sent_is_free(tmp_path: Path) -> None:
    class GeneratesUnseenTokens(RecordingFilter):
        async def on_request(self, context: RequestContext) -> bool:
            context.delivered.output_tokens = 3
            return await super().on_request(context)

    async def script(request: UpstreamRequest) -> None:
        await asyncio.sleep(0.1)  # until the gateway starts the stream
        request.writer.close()

    usage_log, records = UsageLog(tmp_path), list[UsageRecord]()
    filters: list[RequestFilter] = [UsageRecorder(usage_log), GeneratesUnseenTokens()]
    async with (
        fake_upstream(script) as upstream,
        run_gateway(filters, ReplicaConfig(url=upstream.url), early_stream_start_s=0.01) as gateway,
    ):
        body = {"model": "big", "prompt": PROMPT, "n": 2} | STREAM
        response = await gateway.client.post(COMPLETIONS, json=body)
        assert (response.status_code, "upstream_failed" in response.text) == (200, True)
        await gateway.wait_until_idle()
    usage_log.drain(records.extend)
    usage_log.close()
    assert [(billed(record), record.status) for record in records] == [(NOTHING, "failed")]


async def test_rejected_request_is_free(tmp_path: Path) -> None:
    async def script(request: UpstreamRequest) -> None:
        request.send_json(422, {"error": {"message": "The temperature is too high."}})

    async with (
        fake_upstream(script) as upstream,
        run_metered_gateway(tmp_path, upstream.url) as metered,
    ):
        await metered.post()
        record = await metered.assert_consistent()
    assert (billed(record), record.status) == (NOTHING, "refused")
