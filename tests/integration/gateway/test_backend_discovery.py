"""Detection of each backend, its load report and its health check."""

from __future__ import annotations

import itertools
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import (
    SELF_HOSTED,
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
from tests.support.fake_backend import (
    ANSWER_TEXT,
    ANSWER_TOKENS,
    FakeBackend,
    Fault,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    StreamResult,
    gateway_to,
    stream,
)
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.gateway import GatewayServer
from argosy.policy import BLOCK_TOKENS, health_check

DETECTED: dict[type[FakeBackend], tuple[str, int | None, float, int]] = {
    Vllm: ("vllm", 5, 0.25, 0),
    Sglang: ("sglang", 5, 0.5, 8),
    TensorRtLlm: ("tensorrt-llm", 5, 0.25, 8),
    Tgi: ("tgi", 5, 0.0, 0),
    Lmdeploy: ("lmdeploy", 5, 0.125, 0),
    LlamaCpp: ("llama.cpp", 0, 0.0, 4),
}
"""Kind, waiting requests, KV usage and slots that the gateway reads from each backend."""
each_backend = pytest.mark.parametrize("backend_class", SELF_HOSTED)


@pytest.fixture
def _frequent_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOAD_PROBE_INTERVAL_S", "HEALTH_PROBE_INTERVAL_S"):
        monkeypatch.setattr(health_check, name, 0.05)


@each_backend
async def test_backend_is_detected_with_its_load(backend_class: type[FakeBackend]) -> None:
    backend = backend_class(num_running=3, num_waiting=5)
    async with gateway_to(backend) as (server, _):
        replica = server.replicas[0]
        kind, waiting, kv_usage, max_seqs = DETECTED[backend_class]
        await until(lambda: replica.load.running)
        load = replica.load
        assert replica.kind == kind
        assert (load.running, load.waiting, load.kv_usage_ratio) == (3, waiting, kv_usage)
        assert load.max_seqs == max_seqs
        if backend_class is Vllm:  # its 40 blocks of 16 tokens bound what it can have cached
            replica.prefix_index.on_prompt_sent([b"%d" % number for number in range(1000)])
            assert len(replica.prefix_index) == 40 * 16 // BLOCK_TOKENS
        assert replica.max_model_len == (64 if backend_class is Vllm else None)


@pytest.mark.usefixtures("_frequent_probes")
async def test_backend_that_starts_late_is_detected() -> None:
    backend = Sglang(is_healthy=False)
    async with gateway_to(backend) as (server, client):
        assert server.replicas[0].kind == "auto"
        response = await client.post(COMPLETION, json=BODIES[COMPLETION])
        assert response.status_code == 503
        backend.is_healthy = True
        await until(lambda: server.replicas[0].kind != "auto")
        assert (await stream(client, COMPLETION)).text == ANSWER_TEXT


async def test_waiting_requests_of_backend_count_as_queued_tokens() -> None:
    busy, idle = Vllm(num_waiting=40), Vllm()
    async with gateway_to(busy, idle) as (server, _):
        loads = {replica.name: replica.load for replica in server.replicas}
        await until(lambda: loads[busy.url].waiting)
        assert loads[busy.url].queued_tokens > loads[idle.url].queued_tokens == 0


@each_backend
@pytest.mark.usefixtures("_frequent_probes")
async def test_backend_without_load_report_is_served(backend_class: type[FakeBackend]) -> None:
    class WithoutLoad(backend_class):  # type: ignore[misc, valid-type]
        def get_pages(self) -> dict[str, object]:
            pages = super().get_pages()
            return {path: pages[path] for path in pages.keys() & {"/v1/models", "/info"}}

    backend = WithoutLoad()
    async with gateway_to(backend) as (server, client):
        assert server.replicas[0].kind == DETECTED[backend_class][0]
        await until(lambda: "/health" in backend.fetched_paths)
        assert server.replicas[0].health.breaker.is_closed
        assert (await stream(client, COMPLETION)).text == ANSWER_TEXT


@pytest.mark.usefixtures("_frequent_probes")
async def test_load_report_that_starts_with_first_request_is_read() -> None:
    """TGI has no gauge before its first request."""

    class New(Tgi):
        def load_pages(self) -> dict[str, object]:
            pages = super().load_pages()
            return pages if self.requests else pages | {"/metrics": ""}

    backend = New(num_running=3)
    with capture_logs() as logs:
        async with gateway_to(backend) as (server, client):
            await until(lambda: backend.fetched_paths.count("/health") > 1)
            assert (await stream(client, COMPLETION)).text == ANSWER_TEXT
            await until(lambda: server.replicas[0].load.running == 3)
    assert [line["event"] for line in logs].count("load_report_invalid") == 1


@pytest.mark.parametrize("priority_scheduling", [False, True])
@pytest.mark.usefixtures("_frequent_probes")
async def test_unhealthy_backend_gets_requests_after_test_generation(
    priority_scheduling: bool,
) -> None:
    """The test generation has the highest priority, so that it does not wait behind other requests."""
    one, two = Sglang(), Sglang()
    async with gateway_to(one, two, priority_scheduling=priority_scheduling) as (server, client):
        one.is_healthy = False
        breaker = next(
            replica.health.breaker for replica in server.replicas if replica.name == one.url
        )
        await until(lambda: not breaker.is_closed)
        for _ in range(4):
            assert (await stream(client, CHAT)).text == ANSWER_TEXT
        assert not one.requests
        one.is_healthy = True
        await until(lambda: breaker.is_closed)
        for _ in range(2):
            assert (await stream(client, CHAT)).text == ANSWER_TEXT
        test_generation, request = one.requests
        assert (test_generation.body["max_tokens"], request.body["stream"]) == (1, True)
        assert test_generation.body.get("priority", 0) >= request.body.get("priority", 0)
        assert ("priority" in test_generation.body) == priority_scheduling


# --- responses pass unchanged --------------------------------------------------------------------


@each_backend
async def test_stream_through_gateway_equals_stream_of_backend(
    backend_class: type[FakeBackend],
) -> None:
    backend = backend_class()
    async with (
        gateway_to(backend) as (_, client),
        httpx2.AsyncClient(base_url=backend.url) as direct,
    ):
        usage = {"stream_options": {"include_usage": True}}
        for path, fields in itertools.product((CHAT, COMPLETION), ({}, usage)):
            through = await stream(client, path, **fields)
            body = backend.requests[-1].body
            assert "seed" not in body
            assert body["model"] == backend.model
            straight = await stream(direct, path, **fields)
            assert through.text == straight.text == ANSWER_TEXT
            # Some backends send usage and timings in their last chunk without a request for them.
            ignored = {"id", *(() if fields else ("usage", "timings"))}
            assert without_fields(through, ignored) == without_fields(straight, ignored)
            assert through.done_count == 1


def without_fields(result: StreamResult, ignored: set[str]) -> list[dict[str, Any]]:
    """Return the chunks without ignored fields, and without null fields that some backends leave out."""

    def without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
        optional = ("token_ids", "prompt_token_ids", "usage")
        return {
            name: value
            for name, value in fields.items()
            if name not in optional or value is not None
        }

    return [
        {name: value for name, value in without_nulls(chunk).items() if name not in ignored}
        | {"choices": [without_nulls(choice) for choice in chunk["choices"]]}
        for chunk in result.chunks
    ]


@each_backend
async def test_response_and_rejection_pass_unchanged(backend_class: type[FakeBackend]) -> None:
    backend = backend_class()
    async with gateway_to(backend) as (_, client):
        body = BODIES[CHAT] | {"session_id": "a", "timeout_s": 5}
        response = (await client.post(CHAT, json=body)).json()
        assert response["choices"][0]["message"]["content"] == ANSWER_TEXT
        assert response["usage"]["completion_tokens"] == len(ANSWER_TOKENS)
        backend.faults.append(Fault("reject", status=422))
        rejection = await client.post(CHAT, json=BODIES[CHAT])
        assert rejection.status_code == 422
        assert rejection.json() == backend.build_error(422, "not now")


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"headers": {"a b": "c"}}, "plain ASCII"),
        ({"headers": {"a": "c\r\nx: y"}}, "plain ASCII"),
        ({"headers": {"a": "\u20ac"}}, "plain ASCII"),
        ({"api_key_env": "UNSET_VARIABLE"}, "UNSET_VARIABLE is not set"),
    ],
)
def test_invalid_header_of_replica_is_rejected_at_start(
    settings: dict[str, Any], message: str
) -> None:
    model = ModelConfig(name="m", replicas=[ReplicaConfig(url="http://a:1", **settings)])
    with pytest.raises(ValueError, match=rf"http://a:1: .*{message}"):
        GatewayServer(GatewayConfig(models=[model]), lambda _: None)
