"""Servers of other backends: detection, load, health, the requests that they get, and streams that resume."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import Any, Literal

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import (
    SELF_HOSTED,
    Hosted,
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
    PROMPT_IDS,
    FakeBackend,
    Fault,
    serve_backends,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    StreamResult,
    gateway,
    gateway_to,
    replica_config,
    stream,
)
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts
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


@pytest.mark.usefixtures("_frequent_probes")
async def test_unhealthy_backend_gets_requests_after_test_generation() -> None:
    """The test generation has the highest priority, so that it does not wait behind other requests."""
    one, two = Sglang(), Sglang()
    async with gateway_to(one, two, priority_scheduling=True) as (server, client):
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
        assert test_generation.body["priority"] >= request.body["priority"]


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
        extensions |= {"clamp_max_tokens": True, "speculation": False}
        result = await stream(client, CHAT, **extensions)
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
    for request in enforcing.requests[:8]:
        assert request.body["structured_outputs"] == {"regex": "a+"}
        assert "guided_regex" not in request.body


USAGE = {"include_usage": True}
STALL_TIMEOUTS = Timeouts(
    first_token_timeout_s=5.0, stream_idle_timeout_s=0.3, failover_timeout_s=2.0
)
each_path = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@each_path
async def test_stream_resumes_after_disconnect_at_any_event(path: str) -> None:
    one, two = Vllm(name="one"), Vllm(name="two")
    async with gateway_to(one, two) as (server, client):
        whole = await stream(client, path, stream_options=USAGE)
        for count in range(len(whole.chunks) + 1):
            one.faults.append(Fault("disconnect", count))
            result = await stream(client, path, stream_options=USAGE)
            assert not one.faults
            assert (result.text, result.finish_reasons) == (ANSWER_TEXT, ["stop"]), count
            assert result.is_complete
        assert all(replica.load.in_flight == 0 for replica in server.replicas)


async def test_stream_resumes_after_error_abort_or_stall() -> None:
    one, two = Vllm(), Vllm()
    kinds: tuple[Literal["error", "abort", "stall"], ...] = ("error", "abort", "stall")
    async with gateway_to(one, two, timeouts=STALL_TIMEOUTS) as (_, client):
        for kind in kinds:
            one.faults.append(Fault(kind, 4))
            result = await stream(client, COMPLETION)
            assert (result.text, result.finish_reasons) == (ANSWER_TEXT, ["stop"])
            assert result.is_complete
            if kind != "stall":
                one.faults.append(Fault(kind, 4))  # a stream of two choices cannot resume
                result = await stream(client, COMPLETION, n=2)
                assert (result.done_count, len(result.errors)) == (0, 1)


@pytest.mark.parametrize(
    ("backend_class", "fields"),
    [
        (Vllm, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Sglang, {"response_format": {"type": "json_object"}}),
        (Tgi, {"logprobs": True}),
        (LlamaCpp, {"n": 2}),
        (TensorRtLlm, {}),
        (Lmdeploy, {}),
    ],
    ids=["tools", "json", "logprobs", "choices", "tensorrt-llm", "lmdeploy"],
)
async def test_stream_that_cannot_resume_ends_with_error(
    backend_class: type[FakeBackend], fields: dict[str, object]
) -> None:
    one, two = backend_class(), backend_class()
    async with gateway_to(one, two) as (_, client):
        one.faults.append(Fault("disconnect", 5))
        result = await stream(client, CHAT, **fields)
        assert ANSWER_TEXT.startswith(result.text)
        assert result.text
        assert [error["code"] for error in result.errors] == ["upstream_failed"]
        assert not result.done_count
        one.faults.append(Fault("disconnect", 0))  # before the first event it starts elsewhere
        assert (await stream(client, CHAT, **fields)).text == ANSWER_TEXT


@pytest.mark.parametrize("first", ["able", "unable"])
async def test_stream_resumes_on_same_replica_if_no_other_can(first: str) -> None:
    able, unable = Vllm(), Vllm()
    async with serve_backends(able, unable):
        unable_name = f"{1 if first == 'unable' else 3}-unable"
        configs = [  # the first request goes to the first name
            replica_config(able, name="2-able"),
            replica_config(unable, resume_mode="none", name=unable_name),
        ]
        async with gateway(*configs) as (_, client):
            able.faults.append(Fault("disconnect", 4))
            result = await stream(client, CHAT)
    counts = len(able.requests), len(unable.requests)
    if first == "able":
        assert (result.text, result.finish_reasons) == (ANSWER_TEXT, ["stop"])
        assert (result.is_complete, counts) == (True, (2, 0))
    else:
        assert (result.text, result.finish_reasons) == ("Once upon a", [])
        assert [error["code"] for error in result.errors] == ["upstream_failed"]
        assert (result.done_count, counts) == (0, (0, 1))


async def test_stop_string_across_replicas_ends_stream_at_once() -> None:
    one, two = Vllm(), Vllm()
    patient = Timeouts(first_token_timeout_s=600, stream_idle_timeout_s=600)
    async with gateway_to(one, two, timeouts=patient) as (server, client):
        # The second replica sees only the rest of the string, and stalls after it.
        one.faults += [Fault("disconnect", 4), Fault("stall", 1)]
        result = await stream(client, CHAT, stop=["a time"], stream_options=USAGE)
        assert (result.text, result.finish_reasons) == ("Once upon ", ["stop"])
        assert result.token_counts == [(len(PROMPT_IDS), 4)]
        assert result.is_complete
        assert all(replica.load.in_flight == 0 for replica in server.replicas)
        assert all(replica.health.breaker.is_closed for replica in server.replicas)


async def test_resumed_stream_keeps_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Vllm(), Vllm()
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    async with gateway_to(one, two, timeouts=STALL_TIMEOUTS, priority_scheduling=True) as (
        _,
        client,
    ):
        one.faults = two.faults = deque([Fault("stall", 3)])
        running = asyncio.create_task(stream(client, CHAT))
        await until(lambda: one.requests or two.requests)
        now += 100
        assert (await running).text == ANSWER_TEXT
    priorities = [request.body["priority"] for request in (*one.requests, *two.requests)]
    assert priorities == [1_000_005] * 2


@pytest.mark.parametrize("streams", [False, True])
async def test_resume_field_for_backend_without_exact_resume_is_rejected(streams: bool) -> None:
    """A response from the start would be taken for the rest of the client's."""
    backend = Vllm()
    async with gateway_to(backend) as (_, client):
        body = BODIES[COMPLETION] | {"stream": streams}
        response = await client.post(COMPLETION, json=body | {"resume": {"token_ids": [100, 101]}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "resume")
        assert not backend.requests
        assert (await client.post(COMPLETION, json=body | {"resume": None})).status_code == 200
