"""Inputs of routing: speeds, context lengths, cache contents and response lengths, reported by replicas or measured."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, constant_script, reply_script
from tests.support.fake_upstream import UpstreamRequest, fake_upstream, respond_with_tokens
from tests.support.gateway_harness import RecordingFilter, open_breaker, run_gateway
from tests.support.placed_requests import placement_of
from tests.support.replica_servers import MODEL, bundled_model_engine, chat, completion, serve
from tests.support.waiting import until

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway.pool import Prober, ReplicaEndpoint
from argosy.gateway.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    AttemptOutcome,
    ReplicaLoad,
    compute_prefix_keys,
)
from argosy.protocol import parse_endpoint
from argosy.telemetry import CoreStats

UNKNOWN = ReplicaLoad("unknown")


async def test_argosy_replica_reports_speed_context_and_cache_size() -> None:
    async with serve(bundled_model_engine(blocks=96, warmup=True)) as served:
        replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(served.url)))
        prober = Prober(replica)
        await prober.probe()
        assert replica.has_reported_speed  # by the warm-up
        assert replica.load.inter_token_s == served.replica.engine.info.step_s > 0
        body = completion("Once upon a time " * 40, max_tokens=20, ignore_eos=True)
        assert (await served.client.post("/v1/completions", json=body)).status_code == 200
        await prober.probe()
        load_report = (await served.client.get("/load")).json()
        assert replica.has_reported_speed
        assert replica.load.prefill_tokens_per_s == load_report["prefill_tokens_per_s"] > 0
        assert replica.load.inter_token_s == load_report["decode_s"] > 0
        usage = load_report["usage"]
        assert 0 < usage["memory_bytes"] < usage["host_memory_bytes"]
        assert 0 < usage["host_free_bytes"] < usage["host_memory_bytes"]
        assert replica.max_model_len == load_report["max_model_len"]
        blocks = 96 * load_report["block_size"] // BLOCK_TOKENS
        replica.prefix_index.on_prompt_sent(
            compute_prefix_keys(b"", b"x" * BLOCK_BYTES * 500, BLOCK_BYTES)
        )
        assert len(replica.prefix_index) == blocks
        replica.upstream.close()


async def test_speed_of_other_server_is_measured_from_its_streams() -> None:
    recorder, send_more = RecordingFilter(), asyncio.Event()

    async def send_slowly(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("first")
        await send_more.wait()
        request.send_text("last", "stop")
        request.end_stream()

    async with (
        fake_upstream(send_slowly) as server,
        run_gateway(
            [recorder], ReplicaConfig(url=server.url, kind="openai", model="rough")
        ) as gateway,
    ):
        body = completion("Say it. " * 200, model="big", max_tokens=9, stream=True)
        async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.aiter_text()
            await anext(chunks)
            send_more.set()
            assert "last" in "".join([chunk async for chunk in chunks])
        (load,) = recorder.completed[0].pool.reachable_loads()
        assert load.ttft.value(recorder.completed[0].trace.arrived_at) > 0
        assert load.prefill_tokens_per_s != UNKNOWN.prefill_tokens_per_s
        assert load.inter_token_s != UNKNOWN.inter_token_s


async def test_speed_measured_during_stall_is_reset_after_recovery() -> None:
    """Otherwise the replica would get no requests that show its real speed while others have free slots."""
    recorder, send_more = RecordingFilter(), asyncio.Event()

    async def stall(request: UpstreamRequest) -> None:
        request.start_stream()
        request.send_text("first")
        await send_more.wait()
        request.send_text("second")
        await asyncio.Event().wait()

    async with (
        fake_upstream(stall) as server,
        run_gateway(
            [recorder], ReplicaConfig(url=server.url, kind="openai", model="rough")
        ) as gateway,
    ):
        (replica,) = gateway.replicas
        body = completion("Say it.", model="big", max_tokens=9, stream=True)
        async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            chunks = response.aiter_text()
            await anext(chunks)
            send_more.set()
            await until(lambda: replica.load.inter_token_s > 0.2)
        open_breaker(replica)
        await gateway.probe()
        assert replica.load.inter_token_s == UNKNOWN.inter_token_s


@pytest.mark.parametrize("tokens", [None, 4096])
async def test_context_length_of_other_server_is_read_from_model_list(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {"id": "rough", "object": "model"} | ({"max_model_len": tokens} if tokens else {})
    monkeypatch.setattr("tests.support.fake_upstream.MODELS", {"data": [card]})
    async with fake_upstream() as server:
        replica = ReplicaEndpoint("r", "openai", "rough", Upstream(parse_endpoint(server.url)))
        await Prober(replica).probe()
        assert replica.max_model_len == tokens
        replica.upstream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_reported_cache_miss_corrects_cache_estimate(
    tokenizer: Tokenizer, stream: bool
) -> None:
    recorder = RecordingFilter()
    engine = FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes.")))
    async with (
        serve(engine) as served,
        run_gateway([recorder], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):

        async def estimate_cached_prompts(number: int) -> int:
            """Send a prompt and return the number of prompts that the replica is estimated to have cached."""
            body = chat(f"{number}: " + "and so on " * 100, model="big", stream=stream)
            response = await gateway.client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            (replica,) = recorder.completed[-1].pool.replicas.values()
            return len(replica.prefix_index) // (
                len(recorder.completed[-1].fields.raw_prompt) // BLOCK_BYTES
            )

        assert [await estimate_cached_prompts(number) for number in range(5)] == [1, 2, 3, 4, 5]
        # The engine reports only three tokens as cached, so older entries are dropped as well.
        assert await estimate_cached_prompts(3) == 2
        assert await estimate_cached_prompts(9) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_finished_requests_do_not_count_as_waiting(stream: bool) -> None:
    recorder, release = RecordingFilter(), asyncio.Event()

    async def script(request: UpstreamRequest) -> None:
        prompt = str(request.body["prompt"])
        if prompt.startswith("long"):
            await release.wait()
        if prompt.startswith("broken"):
            request.send_json(500, {"error": {"message": "out of order"}})
        elif request.body.get("stream"):
            await respond_with_tokens(request)
        else:
            request.send_json(
                200, {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]}
            )

    async with (
        fake_upstream(script) as server,
        run_gateway([recorder], ReplicaConfig(url=server.url, kind="openai")) as gateway,
    ):

        def send_prompt(prompt: str) -> asyncio.Task[httpx2.Response]:
            body = completion(prompt + " and so on" * 100, model="big", max_tokens=3, stream=stream)
            return asyncio.create_task(gateway.client.post("/v1/completions", json=body))

        long_request = send_prompt("long")  # keeps the replica busy
        await until(lambda: len(server.requests) == 1)
        (replica,) = gateway.replicas
        sent_tokens = replica.load.sent_tokens
        assert sent_tokens > 0
        for number in range(5):
            assert (await send_prompt(f"{number}")).status_code == 200
            assert replica.load.sent_tokens == sent_tokens
        assert (await send_prompt("broken")).status_code == 502
        cancelled = send_prompt("long ago")
        await until(lambda: replica.load.in_flight == 2)
        cancelled.cancel()
        await until(lambda: replica.load.in_flight == 1)
        assert replica.load.sent_tokens == sent_tokens
        release.set()
        assert (await long_request).status_code == 200


async def test_restarted_replica_has_empty_cache_estimate(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes.")))
    keys = compute_prefix_keys(b"", b"x" * 1000, BLOCK_BYTES)
    async with serve(engine) as served:
        replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(served.url)))
        prober = Prober(replica)
        replica.prefix_index.on_prompt_sent(keys)
        for step, expected_blocks in ((7, 3), (8, 3), (2, 0)):
            engine.stats = CoreStats(step=step, blocks_total=1024)
            await prober.probe()
            assert len(replica.prefix_index) == expected_blocks
        replica.prefix_index.on_prompt_sent(keys)
        for _ in range(3):
            replica.on_request_sent(1)
            replica.on_request_ended(AttemptOutcome.FAILURE, 0.0)
        assert len(replica.prefix_index) == 0
        replica.upstream.close()


async def test_unreachable_replica_is_logged_once_and_on_recovery() -> None:
    async with fake_upstream(respond_with_tokens) as server:
        replica = ReplicaEndpoint("r", "openai", "rough", Upstream(parse_endpoint(server.url)))
    prober = Prober(replica)
    with capture_logs() as logs:
        await prober.probe()
        await prober.probe()
    (entry,) = [entry for entry in logs if entry["event"] == "replica_unreachable"]
    assert "refused" in entry["reason"]
    with capture_logs() as logs:
        async with fake_upstream(respond_with_tokens, port=server.port):
            await prober.probe()
            await prober.probe()
    assert [entry["event"] for entry in logs].count("replica_reachable_again") == 1
    replica.upstream.close()
    with capture_logs() as logs:
        await prober.probe()
    (entry,) = [entry for entry in logs if entry["event"] == "replica_unreachable"]
    assert entry["replica"] == "r"


async def test_expected_output_length_follows_earlier_responses(tokenizer: Tokenizer) -> None:
    recorder = RecordingFilter()
    engine = FakeEngine(tokenizer, constant_script(reply_script(tokenizer, "Yes.")))
    async with (
        serve(engine) as served,
        run_gateway([recorder], ReplicaConfig(url=served.url, model=MODEL)) as gateway,
    ):
        for _ in range(100):
            body = chat("Is it so?", model="big", n=2)
            assert (await gateway.client.post("/v1/chat/completions", json=body)).is_success
        context = recorder.completed[-1]
        decode_s = context.pool.reachable_loads()[0].inter_token_s
        (cost,) = context.trace.attempts[-1].candidate_costs
        assert cost.decode_s < 100 * decode_s


async def test_expected_output_length_follows_whole_responses_of_other_servers() -> None:
    async def respond_short(request: UpstreamRequest) -> None:
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        choices = [{"index": i, "text": "yes", "finish_reason": "stop"} for i in range(2)]
        request.send_json(200, {"choices": choices, "usage": usage})

    recorder = RecordingFilter()
    async with (
        fake_upstream(respond_short) as server,
        run_gateway([recorder], ReplicaConfig(url=server.url, kind="openai")) as gateway,
    ):
        body = completion("Is it so?", model="big", n=2, max_tokens=500)
        initial_estimate = None
        for _ in range(100):
            assert (await gateway.client.post("/v1/completions", json=body)).is_success
            context = recorder.completed[-1]
            initial_estimate = initial_estimate or context.pool.expected_output_tokens(
                placement_of(context)
            )
        assert initial_estimate is not None
        assert initial_estimate > 400
        assert context.pool.expected_output_tokens(placement_of(context)) <= 2 * 32
