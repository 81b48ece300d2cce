"""Hostile and faulty clients: each request gets one 4xx response, and the server keeps serving."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from benchmarks import hostile_requests
from benchmarks.hostile_grammars import hostile_fields
from benchmarks.hostile_upstreams import answer
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.gateway_client import run_gateway_server
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    bundled_model_engine,
    chat,
    completion,
    serve,
)
from tests.support.waiting import until

from argosy.deployment import AuthConfig, GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.process import run_in_daemon_thread
from argosy.protocol import parsing
from argosy.store import StoreConfig

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HUGE_INTEGER = 10**30


def chat_body_with(body: bytes) -> bytes:
    """A chat body with `body` after its last field."""
    return json.dumps(chat()).encode()[:-1] + b"," + body + b"}"


HOSTILE_BODIES: dict[str, tuple[str, bytes]] = {
    "empty": (CHAT, b""),
    "not json": (CHAT, b"hello"),
    "truncated": (CHAT, b'{"model": "te'),
    "two documents": (CHAT, b"{}{}"),
    "array": (CHAT, b"[]"),
    "null": (CHAT, b"null"),
    "broken utf-8": (CHAT, chat_body_with(b'"user": "\xff\xfe"')),
    "broken utf-8 in a name": (CHAT, chat_body_with(b'"\xff": 1')),
    "nul bytes": (CHAT, b"\x00" * 100),
    "byte order mark": (CHAT, b"\xef\xbb\xbf{}"),
    "lone surrogate": (CHAT, chat_body_with(b'"user": "\\ud800"')),
    "NaN": (CHAT, chat_body_with(b'"temperature": NaN')),
    "infinity": (CHAT, chat_body_with(b'"temperature": 1e999')),
    "minus infinity": (CHAT, chat_body_with(b'"top_p": -Infinity')),
    "huge int": (CHAT, chat_body_with(b'"n": ' + b"9" * 4000)),
    "huge seed": (CHAT, chat_body_with(b'"seed": ' + str(HUGE_INTEGER).encode())),
    "float for int": (CHAT, chat_body_with(b'"n": 1.5')),
    "bool for int": (CHAT, chat_body_with(b'"n": true')),
    "string for number": (CHAT, chat_body_with(b'"temperature": "hot"')),
    "deep arrays": (CHAT, chat_body_with(b'"tools": ' + b"[" * 100_000)),
    "deep objects": (CHAT, chat_body_with(b'"response_format": ' + b'{"a":' * 100_000)),
    "deep template variables": (
        CHAT,
        chat_body_with(b'"chat_template_kwargs": ' + b'{"a":' * 100_000),
    ),
    "unknown constraint": (CHAT, chat_body_with(b'"guided_nothing": "a"')),
    "long unknown constraint": (CHAT, chat_body_with(b'"guided_' + b"x" * 100_000 + b'": 1')),
    "long unknown word": (CHAT, chat_body_with(b'"truncation_side": "' + b"x" * 100_000 + b'"')),
    "no messages": (CHAT, json.dumps({"model": MODEL, "messages": []}).encode()),
    "unknown model": (CHAT, json.dumps(chat() | {"model": "x" * 10_000}).encode()),
}
INVALID_FIELDS: dict[str, dict[str, Any]] = {
    "out of range": {"top_p": 2},
    "token id outside the vocabulary": {"allowed_token_ids": [4104]},
    "huge key": {"logit_bias": {str(HUGE_INTEGER): 1}},
    "thousands of stop strings": {"stop": [f"stop {i}" for i in range(5000)]},
    "resume for more choices": {"resume": {"token_ids": [[1], [2]]}},
    "two constraints": {"guided_regex": "a", "response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "too long": {"max_tokens": 100_000},
}
"""A field of each kind. The unit tests of the request processor have the others."""
INVALID_PROMPTS: tuple[object, ...] = (
    [],
    [HUGE_INTEGER],
    "word " * 2_000_000,
    ["a"] * 5000,
    None,
    {"a": 1},
)


async def assert_still_serves(replica_server: RunningReplica) -> None:
    """Check that a chat succeeds and that no request stays open."""
    response = await replica_server.client.post(CHAT, json=chat())
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == REPLY
    await replica_server.replica.wait_drained()
    assert replica_server.replica.http_requests_in_flight == 0


def assert_rejected(status: int, body: bytes) -> dict[str, Any]:
    """Check for a 4xx with a complete error body of bounded size, and return the body."""
    assert 400 <= status < 500, body
    parsed: dict[str, Any] = json.loads(body)
    assert set(parsed["error"]) == {"message", "type", "param", "code"}
    assert parsed["request_id"]
    assert len(body) < 4000
    return parsed


@pytest.mark.parametrize("name", HOSTILE_BODIES)
async def test_hostile_body_is_rejected(replica_server: RunningReplica, name: str) -> None:
    path, body = HOSTILE_BODIES[name]
    response = await replica_server.client.post(path, content=body)
    assert_rejected(response.status_code, response.content)
    await assert_still_serves(replica_server)


@pytest.mark.parametrize("depth", [10, 100, 500, 900, 1100, 5000])
async def test_nested_json_never_causes_server_error(
    replica_server: RunningReplica, depth: int
) -> None:
    """The parser accepts some of these depths and rejects the others."""
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    for field in (b"chat_template_kwargs", b"response_format", b"metadata", b"tools"):
        response = await replica_server.client.post(
            CHAT, content=chat_body_with(b'"' + field + b'": ' + nested)
        )
        if response.status_code != 200:
            assert_rejected(response.status_code, response.content)
    await assert_still_serves(replica_server)


async def test_invalid_request_is_rejected_before_the_engine(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    for name, fields in INVALID_FIELDS.items():
        for path, body in ((CHAT, chat(**fields)), (COMPLETION, completion(**fields))):
            response = await replica_server.client.post(path, json=body)
            error = assert_rejected(response.status_code, response.content)
            assert error["error"]["param"], name
    for prompt in INVALID_PROMPTS:
        response = await replica_server.client.post(COMPLETION, json=completion(prompt))
        assert_rejected(response.status_code, response.content)
    assert not engine.requests
    await assert_still_serves(replica_server)


async def test_hostile_grammar_is_refused_or_costs_its_own_request_only() -> None:
    async with serve(bundled_model_engine()) as replica_server:
        neighbour = asyncio.create_task(
            replica_server.client.post(CHAT, json=chat(max_tokens=400, ignore_eos=True))
        )
        for name, fields in hostile_fields().items():
            response = await replica_server.client.post(CHAT, json=chat(max_tokens=4, **fields))
            if response.status_code != 200:
                assert_rejected(response.status_code, response.content)
            assert response.status_code < 500, name
        assert (await neighbour).status_code == 200
        assert replica_server.replica.engine.state == "ready"


async def test_gateway_parses_large_bodies_outside_of_its_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each endpoint that reads JSON held up the event loop for up to 400 ms."""
    threads: list[int] = []

    def check(body: bytes) -> None:
        threads.append(threading.get_ident())
        check_value_counts(body)

    check_value_counts = parsing._check_value_counts  # noqa: SLF001 - the first step of parsing
    monkeypatch.setattr(parsing, "_check_value_counts", check)
    monkeypatch.setattr(hostile_requests, "LARGE", 1_200_000)
    upstream = await asyncio.start_server(partial(answer, None), "127.0.0.1", 0)
    replica = ReplicaConfig(
        url=f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}", kind="vllm", model="m"
    )
    names = ("argosy-mini", hostile_requests.EMBEDDING_MODEL)
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name=name, replicas=[replica]) for name in names],
        store=StoreConfig(url=f"sqlite:///{tmp_path / 'store.db'}"),
        auth=AuthConfig(mode="disabled"),
    )
    bodies = hostile_requests.large_bodies.__wrapped__()
    bodies.append(("/v1/conversations", hostile_requests.conversation.__wrapped__()))
    async with run_gateway_server(config) as (_, client):
        for path, body in bodies:
            threads.clear()
            response = await client.post(path, content=body)
            assert response.status_code in {200, 400, 404, 413}, (path, response.text)
            assert threads, path
            assert threading.get_ident() not in threads, path
    upstream.close()


async def test_failed_call_in_thread_releases_its_arguments() -> None:
    """Conversations beyond the quota stayed in memory until the next full collection, 4 GB in 15 s."""

    class Body:
        pass

    def refuse(body: Body) -> None:
        raise ValueError(body)

    bodies = [Body()]
    released = weakref.ref(bodies[0])
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await run_in_daemon_thread(refuse, bodies.pop())
        await until(lambda: released() is None)
    finally:
        gc.enable()


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", [[], ["--upstreams"]], ids=["tenant", "upstreams"])
async def test_benchmark_of_hostile_tenants_measures_every_bound(option: list[str]) -> None:
    command = [sys.executable, "-m", "benchmarks.hostile_tenant", "--toy", *option]
    benchmark = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await benchmark.communicate()
    bounds, row = (json.loads(line) for line in output.splitlines())
    assert bounds["bounds"].keys() <= row.keys() | {"core_mib"}
    assert row["requests"] == 3
    assert row["outcomes"]


async def test_wrong_content_type_is_tolerated(replica_server: RunningReplica) -> None:
    body = json.dumps(chat()).encode()
    headers = {"content-type": "text/plain"}
    response = await replica_server.client.post(CHAT, content=body, headers=headers)
    assert response.status_code == 200


def request_head(length: int, *extra: str) -> bytes:
    lines = (f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {length}", *extra, "", "")
    return "\r\n".join(lines).encode()


async def test_compressed_large_or_late_body_is_rejected(engine: FakeEngine) -> None:
    async def too_large() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    config = msgspec.structs.replace(CONFIG, body_limit_bytes=100_000, body_timeout_s=0.1)
    async with serve(engine, config) as replica_server:
        client = replica_server.client
        compressed = await client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
        assert compressed.status_code == 415
        assert_rejected(compressed.status_code, compressed.content)
        assert (await client.post(CHAT, content=too_large())).status_code == 413
        for length, status in ((10**12, b"413"), (100, b"408")):  # without reading, and after it
            reader, writer = await asyncio.open_connection(*address(replica_server))
            writer.write(request_head(length, "connection: close") + b"{")
            assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
            writer.close()
        await assert_still_serves(replica_server)


def address(replica_server: RunningReplica) -> tuple[str, int]:
    host, port = replica_server.url.removeprefix("http://").split(":")
    return host, int(port)


# --- disconnecting and stalled clients -----------------------------------------------------------------


def endless_script(tokenizer: Tokenizer) -> Script:
    words = tokenizer.encode(REPLY, add_special_tokens=False)
    return Script(words * 100_000)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts_all_choices(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    script = endless_script(tokenizer)
    script.pause_after = 3
    engine.script = constant_script(script)
    body = chat(n=2, stream=stream)
    request = asyncio.create_task(replica_server.client.post(CHAT, json=body))
    await engine.paused.wait()
    request.cancel()
    await engine.wait_idle()
    assert len(engine.aborted) == 2
    await replica_server.replica.wait_drained()


async def test_disconnect_before_complete_body_reaches_no_engine(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    _, writer = await asyncio.open_connection(*address(replica_server))
    writer.write(request_head(100) + b"{")
    await writer.drain()
    while not replica_server.replica.http_requests_in_flight:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    writer.close()
    await replica_server.replica.wait_drained()
    assert not engine.requests
    await assert_still_serves(replica_server)


def stalled_reader(url: httpx2.URL, body: dict[str, object]) -> socket.socket:
    """Connect a client that sends a request and reads nothing of the response."""
    content = json.dumps(body).encode()
    client_socket = socket.socket()
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client_socket.connect((url.host, url.port))
    client_socket.sendall(request_head(len(content)) + content)
    return client_socket


ABORT_SAMPLE = 'argosy_requests_aborted_total{model="test-model",reason="slow_reader"} 1.0'
# Each token has a large chunk, so that socket buffers fill before the fake engine's script ends.
VERBOSE: dict[str, Any] = {"n": 8, "logprobs": True, "top_logprobs": 20, "stream": True}


async def test_stalled_reader_is_aborted_and_disconnected(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = constant_script(endless_script(tokenizer))
    engine.max_model_len = 1_000_000
    config = msgspec.structs.replace(CONFIG, slow_reader_timeout_s=0.3)
    async with serve(engine, config) as replica_server:
        with stalled_reader(replica_server.client.base_url, chat(**VERBOSE)) as client_socket:
            await engine.request_received.wait()
            await engine.wait_idle()
            assert engine.aborted
            await replica_server.replica.wait_drained()
            with pytest.raises(ConnectionResetError):
                b"".join(iter(lambda: client_socket.recv(1 << 20), b""))
        assert ABORT_SAMPLE in (await replica_server.client.get("/metrics")).text
        assert not replica_server.server.replica_state.http_requests_in_flight


async def test_slow_reader_gets_complete_stream(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    """The server merges pending deltas, so the client gets the same text in fewer chunks."""
    words = tokenizer.encode(REPLY, add_special_tokens=False)
    engine.script = constant_script(Script(words * 400))
    engine.max_model_len = 100_000
    async with (
        serve(engine) as replica_server,
        replica_server.client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        received = b""
        async for chunk in response.aiter_raw(chunk_size=4096):
            received += chunk
            await asyncio.sleep(0)
    assert received.endswith(b"data: [DONE]\n\n")
