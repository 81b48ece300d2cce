"""Streams of other backends that resume on another replica after a failure."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Literal

import pytest
from tests.support.backend_formats import (
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
from tests.support.fake_backend import (
    ANSWER_TEXT,
    FIRST_TOKEN_ID,
    PROMPT_IDS,
    FakeBackend,
    Fault,
    serve_backends,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    gateway,
    gateway_to,
    replica_config,
    stream,
)
from tests.support.waiting import until

from argosy.deployment import ResumeMode, Timeouts

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


@each_path
async def test_vllm_resumes_from_token_ids(path: str) -> None:
    one, two = Vllm(), Vllm()
    async with gateway_to(one, two) as (_, client):
        one.faults.append(Fault("disconnect", 4))
        assert (await stream(client, path)).text == ANSWER_TEXT
    first, second = sorted(
        [*one.requests, *two.requests], key=lambda request: "Tell" not in str(request.body)
    )
    delivered = 3 if path == CHAT else 4
    token_ids = [*PROMPT_IDS, *range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + delivered)]
    max_tokens = 64 - len(PROMPT_IDS) if path == CHAT else 12
    assert (first.path, second.path) == (path, COMPLETION)
    assert second.body["prompt"] == token_ids
    assert second.body["max_tokens"] == max_tokens - delivered


async def test_stream_with_stop_strings_resumes_from_text() -> None:
    """Text lags behind the tokens while it may become a stop string."""
    one, two = Sglang(), Sglang()
    async with gateway_to(one, two) as (_, client):
        one.faults.append(Fault("disconnect", 3))
        assert (await stream(client, COMPLETION, stop=["never"])).text == ANSWER_TEXT
    prompts = {request.body["prompt"] for request in (*one.requests, *two.requests)}
    assert prompts == {"Tell me", "Tell meOnce upon a"}


async def test_chat_without_token_ids_resumes_in_assistant_message() -> None:
    one, two = Sglang(), Sglang()
    async with gateway_to(one, two) as (_, client):
        one.faults.append(Fault("disconnect", 4))
        assert (await stream(client, CHAT)).text == ANSWER_TEXT
    bodies = [request.body for request in (*one.requests, *two.requests)]
    resumed = next(body for body in bodies if len(body["messages"]) == 2)
    assert resumed["messages"][-1] == {"role": "assistant", "content": "Once upon a"}
    assert (resumed["continue_final_message"], resumed["add_generation_prompt"]) == (True, False)


@each_path
async def test_resumed_stream_with_seed_is_marked(path: str) -> None:
    """From the mark on, the seed no longer determines the output."""
    one, two = Vllm(), Vllm()
    async with gateway_to(one, two) as (_, client):
        for seed, fingerprints in ((7, {None, "resumed"}), (None, {None})):
            one.faults.append(Fault("disconnect", 4))
            result = await stream(client, path, seed=seed)
            assert result.text == ANSWER_TEXT
            assert {chunk.get("system_fingerprint") for chunk in result.chunks} == fingerprints


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


@pytest.mark.parametrize(
    ("resume_mode", "text"), [("none", "Once upon a"), ("prefill", ANSWER_TEXT)]
)
async def test_resume_mode_setting_limits_resume(resume_mode: ResumeMode, text: str) -> None:
    one, two = Vllm(), Vllm()
    async with gateway_to(one, two, resume_mode=resume_mode) as (_, client):
        one.faults.append(Fault("disconnect", 4))
        result = await stream(client, CHAT)
    assert result.text == text
    assert bool(result.errors) == (resume_mode == "none")
    requests = [*one.requests, *two.requests]
    assert not any("return_token_ids" in request.body for request in requests)


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
