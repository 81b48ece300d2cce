"""Fields and headers of the requests that the gateway sends to other backends."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.support.backend_formats import SELF_HOSTED, Hosted, LlamaCpp, Sglang, Vllm
from tests.support.fake_backend import ANSWER_TEXT, FakeBackend, Fault, serve_backends
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    gateway,
    gateway_to,
    replica_config,
    stream,
)

TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.mark.parametrize(("backend_class", "sign"), [(Vllm, 1), (Sglang, -1)])
async def test_priority_combines_arrival_and_client_priority(
    backend_class: type[FakeBackend], sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier requests come first within a tier, and a long wait outweighs a low priority."""
    now = 1_000_000.5
    monkeypatch.setattr(time, "time", lambda: now)
    backend = backend_class()
    async with gateway_to(backend, priority_scheduling=True) as (_, client):
        for delay_s, priority in ((0, 0), (1, 0), (2, 1), (24, 0), (26, 0)):
            now = 1_000_000.5 + delay_s
            await stream(client, CHAT, priority=priority)
        await client.post(CHAT, json=BODIES[CHAT])
    priorities = [sign * request.body["priority"] for request in backend.requests]
    assert priorities[:-1] == [1_000_005, 1_000_006, 1_000_032, 1_000_029, 1_000_031]
    assert priorities[-1] == priorities[-2]  # without a stream as with one


async def test_priority_is_sent_only_to_backends_that_schedule_by_it() -> None:
    disabled, unsupported = Vllm(), LlamaCpp()
    async with serve_backends(disabled, unsupported):
        configs = replica_config(disabled), replica_config(unsupported, priority_scheduling=True)
        async with gateway(*configs) as (_, client):
            for _ in range(2):
                await stream(client, CHAT, priority=1)
    assert not any("priority" in each.requests[0].body for each in (disabled, unsupported))


async def test_hosted_api_gets_its_key_and_no_unknown_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOSTED_KEY", Hosted.key)
    backend = Hosted()
    settings: dict[str, Any] = {
        "api_key_env": "HOSTED_KEY",
        "key_header": "api-key",
        "key_prefix": "Key ",
        "headers": {"OpenAI-Organization": "org-1"},
        "stream_usage": False,
    }
    async with gateway_to(backend, **settings) as (server, client):
        assert server.replicas[0].kind == "openai"
        extensions = {"session_id": "s", "cache_salt": "c", "timeout_s": 30.0, "priority": 1}
        result = await stream(client, CHAT, **extensions, clamp_max_tokens=True)
        assert (result.text, result.is_complete) == (ANSWER_TEXT, True)
        request = backend.requests[0]
        assert request.headers["openai-organization"] == "org-1"
        assert request.body.keys() == {"model", "messages", "stream"}
        trace = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        response = await client.post(CHAT, json=BODIES[CHAT], headers=trace)
        assert trace.items() <= backend.requests[1].headers.items()
        assert response.headers["openai-version"] == "2020-10-01"
        backend.faults.append(Fault("disconnect", 3))
        assert (await stream(client, CHAT)).errors


@pytest.mark.parametrize("limit", [64, 63])
async def test_limit_beyond_the_context_is_left_out_if_the_client_allows_it(limit: int) -> None:
    """Servers such as vLLM refuse it. Without one, the context is the limit, which is 64 here."""
    backend = Vllm()
    async with gateway_to(backend) as (_, client):
        await stream(client, CHAT, max_completion_tokens=limit, clamp_max_tokens=True)
    body = backend.requests[0].body
    assert body.get("max_completion_tokens") == (None if limit == 64 else limit)
    assert "clamp_max_tokens" not in body


INTERNAL_FIELDS = {
    "rid": "another's",
    "request_id": "another's",
    "bootstrap_host": "10.0.0.1",
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
    "migration_request": {"remote_engine_id": "10.0.0.1"},
    "disaggregated_params": {"request_type": "generation_only"},
    "lora_path": "/another",
    "Model": "another",
    "models": ["another"],
    "fallbacks": [{"model": "another"}],
    "id_slot": 0,
    "custom_logit_processor": "{}",
}
"""Fields that backends accept from other parts of their deployment, and that no client may set."""


@pytest.mark.parametrize("backend_class", SELF_HOSTED)
async def test_internal_fields_of_backends_are_removed(backend_class: type[FakeBackend]) -> None:
    backend = backend_class()
    async with gateway_to(backend) as (_, client):
        await stream(client, CHAT)
        for path in (CHAT, COMPLETION):
            await stream(client, path, **INTERNAL_FIELDS)
            response = await client.post(path, json=BODIES[path] | INTERNAL_FIELDS)
            named = response.headers["x-argosy-ignored-fields"].split(",")
            assert set(named) == INTERNAL_FIELDS.keys() - {"request_id", "Model"}
    assert len(backend.requests) == 5
    for request in backend.requests:
        assert request.body.keys().isdisjoint(INTERNAL_FIELDS)


async def test_internal_fields_within_vllm_xargs_are_removed() -> None:
    """The KV transfer of vLLM reads them as a map without a check."""
    backend = Vllm()
    extra = {"ngram_size": 30, "whitelist": [1, 2], "kv_transfer_params": "10.0.0.1"}
    async with gateway_to(backend) as (_, client):
        for xargs in (extra, None):
            await client.post(CHAT, json=BODIES[CHAT] | {"vllm_xargs": xargs})
        response = await client.post(CHAT, json=BODIES[CHAT] | {"vllm_xargs": [extra]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "vllm_xargs")
    forwarded = [request.body["vllm_xargs"] for request in backend.requests]
    assert forwarded == [{"ngram_size": 30, "whitelist": [1, 2]}, {}]


async def test_requests_with_same_client_id_have_distinct_ids_upstream() -> None:
    backend = Vllm()
    async with gateway_to(backend) as (_, client):
        for _ in range(2):
            response = await client.post(CHAT, json=BODIES[CHAT], headers={"x-request-id": "mine"})
            assert response.headers["x-request-id"] == "mine"
    ids = {request.headers["x-request-id"] for request in backend.requests}
    assert len(ids) == 2
    assert "mine" not in ids


@pytest.mark.parametrize(
    ("sent", "forwarded"),
    [
        ({"traceparent": "x" * 60_000, "tracestate": "a=1"}, set()),
        ({"traceparent": TRACEPARENT, "tracestate": "a" * 9_000}, {"traceparent"}),
        ({"traceparent": TRACEPARENT, "tracestate": "é"}, {"traceparent"}),
        ({"tracestate": "a=1"}, set()),
    ],
    ids=["long-parent", "long-state", "non-ascii-state", "state-alone"],
)
async def test_invalid_trace_headers_are_removed(sent: dict[str, str], forwarded: set[str]) -> None:
    backend = Vllm()
    headers = {name.encode(): value.encode() for name, value in sent.items()}
    async with gateway_to(backend) as (_, client):
        await client.post(CHAT, json=BODIES[CHAT], headers=headers)
    assert {"traceparent", "tracestate"} & backend.requests[0].headers.keys() == forwarded


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_constraint_reaches_backend_in_its_own_spelling(path: str) -> None:
    backend = Vllm()
    async with gateway_to(backend) as (_, client):
        await stream(client, path, guided_regex="a+")
        await client.post(path, json=BODIES[path] | {"regex": "a+"})
    for request in backend.requests:
        assert request.body["structured_outputs"] == {"regex": "a+"}
        assert request.body.keys().isdisjoint({"guided_regex", "regex"})


async def test_constraint_that_no_replica_enforces_is_refused() -> None:
    backend = LlamaCpp()
    async with gateway_to(backend) as (_, client):
        response = await client.post(CHAT, json=BODIES[CHAT] | {"guided_regex": "a+"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "guided_regex")
    assert error["code"] == "unsupported_parameter"
    assert "llama.cpp" in error["message"]
    assert not backend.requests


async def test_constrained_request_uses_replica_that_enforces_it() -> None:
    enforcing, other = Vllm(), LlamaCpp()
    async with serve_backends(enforcing, other):
        configs = replica_config(enforcing), replica_config(other)
        async with gateway(*configs) as (_, client):
            for _ in range(4):
                await client.post(CHAT, json=BODIES[CHAT] | {"guided_regex": "a+"})
                assert (await stream(client, CHAT, guided_regex="a+")).is_complete
            for _ in range(2):
                await stream(client, CHAT)
    assert (len(enforcing.requests), len(other.requests)) == (9, 1)
