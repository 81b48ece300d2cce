"""Hostile and broken clients: each request gets one clear answer, nothing is our fault, the process lives."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, always
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    Served,
    chat,
    completion,
    replica_process,
    serve,
)

from argosy.engine.serving.text.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HUGE = 10**30


def raw(body: bytes) -> bytes:
    """A chat body with `body` after its last field."""
    return json.dumps(chat()).encode()[:-1] + b"," + body + b"}"


HOSTILE: dict[str, tuple[str, bytes]] = {
    "empty": (CHAT, b""),
    "not json": (CHAT, b"hello"),
    "truncated": (CHAT, b'{"model": "te'),
    "two documents": (CHAT, b"{}{}"),
    "array": (CHAT, b"[]"),
    "null": (CHAT, b"null"),
    "broken utf-8": (CHAT, raw(b'"user": "\xff\xfe"')),
    "broken utf-8 in a name": (CHAT, raw(b'"\xff": 1')),
    "nul bytes": (CHAT, b"\x00" * 100),
    "byte order mark": (CHAT, b"\xef\xbb\xbf{}"),
    "lone surrogate": (CHAT, raw(b'"user": "\\ud800"')),
    "NaN": (CHAT, raw(b'"temperature": NaN')),
    "infinity": (CHAT, raw(b'"temperature": 1e999')),
    "minus infinity": (CHAT, raw(b'"top_p": -Infinity')),
    "huge int": (CHAT, raw(b'"n": ' + b"9" * 4000)),
    "huge seed": (CHAT, raw(b'"seed": ' + str(HUGE).encode())),
    "float for int": (CHAT, raw(b'"n": 1.5')),
    "bool for int": (CHAT, raw(b'"n": true')),
    "string for number": (CHAT, raw(b'"temperature": "hot"')),
    "deep arrays": (CHAT, raw(b'"tools": ' + b"[" * 100_000)),
    "deep objects": (CHAT, raw(b'"response_format": ' + b'{"a":' * 100_000)),
    "deep template variables": (CHAT, raw(b'"chat_template_kwargs": ' + b'{"a":' * 100_000)),
    "unknown field": (CHAT, raw(b'"guided_regex": "a"')),
    "long unknown field": (CHAT, raw(b'"' + b"x" * 100_000 + b'": 1')),
    "long unknown word": (CHAT, raw(b'"truncation_side": "' + b"x" * 100_000 + b'"')),
    "no messages": (CHAT, json.dumps({"model": MODEL, "messages": []}).encode()),
    "unknown model": (CHAT, json.dumps(chat() | {"model": "x" * 10_000}).encode()),
}
REFUSED: dict[str, dict[str, Any]] = {
    "negative n": {"n": -1},
    "huge n": {"n": HUGE},
    "many n": {"n": 1_000_000},
    "negative max_tokens": {"max_tokens": -5},
    "huge max_tokens": {"max_tokens": HUGE},
    "temperature": {"temperature": 1e300},
    "top_p": {"top_p": 2},
    "min_p": {"min_p": -0.1},
    "top_k": {"top_k": HUGE},
    "penalty": {"repetition_penalty": 0},
    "token id in stop_token_ids": {"stop_token_ids": [HUGE]},
    "negative token id": {"stop_token_ids": [-1]},
    "token id outside the vocabulary": {"allowed_token_ids": [4096]},
    "logit bias outside": {"logit_bias": {"999999": 1}},
    "huge logit bias key": {"logit_bias": {str(HUGE): 1}},
    "huge logit bias": {"logit_bias": {"5": 1e300}},
    "thousands of stop strings": {"stop": [f"stop {i}" for i in range(5000)]},
    "empty stop string": {"stop": [""]},
    "priority": {"priority": HUGE},
    "timeout": {"timeout_s": -1},
    "resume outside": {"resume": {"token_ids": [HUGE]}},
    "resume for more choices": {"resume": {"token_ids": [[1], [2]]}},
    "stream options": {"stream": True, "stream_options": {"include_everything": True}},
    "cache salt": {"cache_salt": ""},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "prompt too long": {"max_tokens": 100_000},
}
PROMPTS: dict[str, object] = {
    "empty list": [],
    "list of empty": [[]],
    "mixed": ["a", [1]],
    "huge id": [HUGE],
    "negative id": [-1],
    "id outside": [4096],
    "ten megabytes": "word " * 2_000_000,
    "a million ids": [1] * 1_000_000,
    "thousands of prompts": ["a"] * 5000,
    "null": None,
    "object": {"a": 1},
}


async def still_serves(served: Served) -> None:
    answer = await served.client.post(CHAT, json=chat())
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == REPLY
    await served.replica.wait_drained()
    assert served.replica.http_requests_in_flight == 0


def assert_refusal(status: int, body: bytes) -> dict[str, Any]:
    """A 4xx with a whole error body of bounded size."""
    assert 400 <= status < 500, body
    told: dict[str, Any] = json.loads(body)
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["request_id"]
    assert len(body) < 4000
    return told


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bodies(served: Served, name: str) -> None:
    path, body = HOSTILE[name]
    answer = await served.client.post(path, content=body)
    assert_refusal(answer.status_code, answer.content)
    await still_serves(served)


@pytest.mark.parametrize("depth", [10, 100, 500, 900, 1100, 5000])
async def test_nesting_of_any_depth(served: Served, depth: int) -> None:
    """Deep enough to parse, or not: never our fault."""
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    for field in (b"chat_template_kwargs", b"response_format", b"metadata", b"tools"):
        answer = await served.client.post(CHAT, content=raw(b'"' + field + b'": ' + nested))
        if answer.status_code != 200:
            assert_refusal(answer.status_code, answer.content)
    await still_serves(served)


async def test_refused_parameters(served: Served) -> None:
    for name, extra in REFUSED.items():
        for path, body in ((CHAT, chat(**extra)), (COMPLETION, completion(**extra))):
            answer = await served.client.post(path, json=body)
            told = assert_refusal(answer.status_code, answer.content)
            assert told["error"]["param"], name
    await still_serves(served)


async def test_refused_prompts(served: Served, engine: FakeEngine) -> None:
    for prompt in PROMPTS.values():
        answer = await served.client.post(COMPLETION, json=completion(prompt))
        assert_refusal(answer.status_code, answer.content)
    assert not engine.requests
    await still_serves(served)


async def test_wrong_content_type_is_tolerated(served: Served) -> None:
    body = json.dumps(chat()).encode()
    headers = {"content-type": "text/plain"}
    assert (await served.client.post(CHAT, content=body, headers=headers)).status_code == 200


async def test_compressed_body_is_refused(served: Served) -> None:
    headers = {"content-encoding": "gzip"}
    answer = await served.client.post(CHAT, content=b"x", headers=headers)
    assert answer.status_code == 415
    assert_refusal(answer.status_code, answer.content)


# --- limits of size and time ---------------------------------------------------------------------


async def talk(served: Served, request: bytes) -> bytes:
    """Everything that the server answers to these bytes until it closes."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def head(length: int, *extra: str) -> bytes:
    lines = (f"POST {CHAT} HTTP/1.1", "host: x", f"content-length: {length}", *extra, "", "")
    return "\r\n".join(lines).encode()


async def test_large_body_is_refused_before_it_is_read(served: Served) -> None:
    answer = await talk(served, head(10**12, "connection: close"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    await still_serves(served)


async def test_large_chunked_body_is_refused(engine: FakeEngine) -> None:
    async with serve(engine, msgspec.structs.replace(CONFIG, body_limit_bytes=100_000)) as served:

        async def body() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x" * 10_000

        answer = await served.client.post(CHAT, content=body())
        assert answer.status_code == 413
        await still_serves(served)


async def test_body_that_does_not_come_is_refused(engine: FakeEngine) -> None:
    async with serve(engine, msgspec.structs.replace(CONFIG, body_timeout_s=0.1)) as served:
        answer = await talk(served, head(100, "connection: close") + b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        await still_serves(served)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS client hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
    ],
    ids=["tls", "version", "length", "path", "header", "url"],
)
async def test_bad_http_is_400(served: Served, request_bytes: bytes) -> None:
    try:
        answer = await talk(served, request_bytes)
    except ConnectionResetError:  # it was refused while we still sent
        answer = b"HTTP/1.1 400 "
    assert answer.startswith(b"HTTP/1.1 400 ")
    await still_serves(served)


async def test_pipelined_requests_are_each_answered_once(served: Served) -> None:
    body = json.dumps(chat()).encode()
    one = head(len(body)) + body
    last = head(len(body), "connection: close") + body
    answer = await talk(served, one + one + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.count(b'"chat.completion"') == 3


# --- clients that leave or stall -----------------------------------------------------------------


def endless(tokenizer: Tokenizer) -> Script:
    words = tokenizer.encode(REPLY, add_special_tokens=False)
    return Script(words * 100_000)


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer, stream: bool
) -> None:
    script = endless(tokenizer)
    script.pause_after = 3
    engine.script = always(script)
    body = chat(n=2, stream=stream)
    request = asyncio.create_task(served.client.post(CHAT, json=body))
    await engine.paused.wait()
    request.cancel()
    await engine.nothing_runs()
    assert len(engine.aborted) == 2
    await served.replica.wait_drained()


async def test_disconnect_before_the_body_is_complete(served: Served, engine: FakeEngine) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(head(100) + b"{")
    await writer.drain()
    while not served.replica.http_requests_in_flight:  # noqa: ASYNC110 - the server shows it in no other way
        await asyncio.sleep(0)
    writer.close()
    await served.replica.wait_drained()
    assert not engine.requests
    await still_serves(served)


def stalled_reader(url: httpx2.URL, body: dict[str, object]) -> socket.socket:
    """A client that has sent a request and takes nothing of the answer."""
    content = json.dumps(body).encode()
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.connect((url.host, url.port))
    peer.sendall(head(len(content)) + content)
    return peer


def read_all(peer: socket.socket) -> None:
    while peer.recv(1 << 20):
        pass


CUT = 'argosy_requests_aborted_total{model="test-model",reason="slow_reader"} 1.0'
# Much to send for each token, so that buffers fill before the fake engine's cache does.
VERBOSE: dict[str, Any] = {"n": 8, "logprobs": True, "top_logprobs": 20, "stream": True}


async def test_reader_that_stalls_is_aborted(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.script = always(endless(tokenizer))
    engine.max_model_len = 1_000_000
    config = msgspec.structs.replace(CONFIG, slow_reader_timeout_s=0.3)
    async with serve(engine, config) as served:
        with stalled_reader(served.client.base_url, chat(**VERBOSE)):
            await engine.asked.wait()
            await engine.nothing_runs()
            assert engine.aborted
            await served.replica.wait_drained()
        assert CUT in (await served.client.get("/metrics")).text
        assert not served.server.replica_state.http_requests_in_flight


async def test_reader_that_stalls_is_cut_off() -> None:
    """The same as the replica runs in production: a process of its own on uvloop."""
    config = msgspec.structs.replace(CONFIG, slow_reader_timeout_s=0.3)
    async with replica_process(config) as (_, client):
        with stalled_reader(client.base_url, chat("endless", **VERBOSE)) as peer:
            while CUT not in (await client.get("/metrics")).text:
                pass
            with pytest.raises(ConnectionResetError):
                await asyncio.to_thread(read_all, peer)
        assert (await client.get("/load")).json()["server_load"] == 0


async def test_reader_that_is_slow_but_steady_is_served(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """What waits for it is merged: it gets the same text in fewer chunks."""
    words = tokenizer.encode(REPLY, add_special_tokens=False)
    engine.script = always(Script(words * 400))
    engine.max_model_len = 100_000
    async with (
        serve(engine) as served,
        served.client.stream("POST", CHAT, json=chat(stream=True)) as answer,
    ):
        seen = b""
        async for piece in answer.aiter_raw(chunk_size=4096):
            seen += piece
            await asyncio.sleep(0)
    assert seen.endswith(b"data: [DONE]\n\n")
