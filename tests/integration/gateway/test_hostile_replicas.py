"""Replicas that mean harm: what they answer costs what they answer, and nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx2
import pytest
from tests.support.gateway_harness import Running, front

from argosy.gateway.backends import BackendKind, stream_events
from argosy.gateway.config import ReplicaConfig
from argosy.gateway.pool.prober import MAX_LOAD_REPORT_BYTES
from argosy.gateway.proxy.failover import MAX_JSON_CONTAINERS
from argosy.gateway.request_fields import MAX_CHOICES
from argosy.gateway.upstream.fetch import MAX_FETCHED_BYTES

CHAT = "/v1/chat/completions"
BODY = {"model": "big", "messages": [{"role": "user", "content": "Hi"}]}
STREAM = BODY | {"stream": True}
DEEP = b"[" * 100_000 + b"]" * 100_000


def whole(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (
        kind,
        len(body),
        body,
    )


def streamed(*events: bytes) -> bytes:
    body = b"".join(b"data: " + event + b"\n\n" for event in (*events, b"[DONE]"))
    return whole(body, b"text/event-stream")


@contextlib.asynccontextmanager
async def behind(
    answers: Callable[[str], bytes], kind: BackendKind = "vllm"
) -> AsyncIterator[Running]:
    """A front of a replica that answers each path as `answers` says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            writer.write(answers(head.split(" ")[1]))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, front([], ReplicaConfig(url=url, name="bad", kind=kind)) as running:
        yield running


def kind_of(answer: httpx2.Response) -> str:
    return answer.headers["content-type"]


@pytest.mark.parametrize("kind", ["text/html", "TEXT/HTML; a=b", "image/svg+xml", "", "nonsense"])
async def test_no_page_comes_from_a_replica(kind: str) -> None:
    """It would speak to the gateway as whoever looks at it: on their own machine, as its administrator."""
    page = whole(b"<script>fetch('/admin/keys')</script>", kind.encode())
    page = page.replace(b"200 OK", b"403 Forbidden")
    async with behind(lambda _: page) as running:
        assert kind_of(await running.client.post(CHAT, json=BODY)) == "text/plain"
        assert kind_of(await running.client.get("/replicas/bad/metrics")) == "text/plain"


async def test_what_replicas_do_say_keeps_its_type() -> None:
    metrics = "text/plain; version=0.0.4; charset=utf-8"
    told = whole(b"{}"), whole(b"x 1\n", metrics.encode())
    async with behind(lambda path: told[path == "/metrics"]) as running:
        assert kind_of(await running.client.post(CHAT, json=BODY)) == "application/json"
        assert kind_of(await running.client.get("/replicas/bad/metrics")) == metrics


async def test_a_whole_answer_that_is_nested_too_deeply_passes_as_it_came() -> None:
    answer = b'{"x": ' + DEEP + b"}"
    async with behind(lambda path: whole(answer if path == CHAT else b"{}")) as running:
        got = await running.client.post(CHAT, json=BODY)
    assert (got.status_code, got.content) == (200, answer)


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (b"200 OK", b'{"choices": [%b{}]}' % (b"{}," * MAX_CHOICES)),
        (b"200 OK", b'{"x": [%b{}]}' % (b"{}," * MAX_JSON_CONTAINERS)),
        (b"404 Not Found", b'{"error": [%b{}]}' % (b"{}," * MAX_JSON_CONTAINERS)),
    ],
    ids=["choices", "objects", "error"],
)
async def test_what_takes_longer_to_read_than_any_answer_is_none(
    status: bytes, answer: bytes
) -> None:
    """Sixty megabytes of choices that say nothing kept a gateway from everybody for half a minute."""
    told = whole(answer).replace(b"200 OK", status)
    async with behind(lambda path: told if path == CHAT else whole(b"{}")) as running:
        got = await running.client.post(CHAT, json=BODY)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "upstream_failed")


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("openai", b'{"choices": [%b{}]}' % (b"{}," * MAX_CHOICES)),
        ("openai", b'{"choices": [], "x": [%b{}]}' % (b"{}," * stream_events.MAX_JSON_CONTAINERS)),
        ("vllm", b'{"choices": [], "x": [%b{}]}' % (b"{}," * stream_events.MAX_JSON_CONTAINERS)),
    ],
    ids=["choices", "objects", "carriable"],
)
async def test_nor_is_an_event_of_a_stream(kind: BackendKind, told: bytes) -> None:
    answers = streamed(told)
    async with behind(lambda path: answers if path == CHAT else whole(b"{}"), kind) as running:
        got = await running.client.post(CHAT, json=STREAM)
    assert b"upstream_failed" in got.content


async def test_nor_of_one_of_ours_that_is_to_be_sent_whole() -> None:
    told = b'data: {"id":"x","created":1,"model":"m","choices":[],"x":[%b{}]}\n\n: argosy prompt 1 0\n\n'
    answers = whole(told % (b"{}," * stream_events.MAX_JSON_CONTAINERS), b"text/event-stream")
    async with behind(lambda path: answers if path == CHAT else whole(b"{}"), "argosy") as running:
        running.replicas[0].on_reported_state("ready", 0.0)
        got = await running.client.post(CHAT, json=BODY)
        trace = running.traces.find(got.headers["x-argosy-request"])
    assert trace is not None
    assert "objects" in trace.attempts[0].reason


async def test_an_explanation_is_small_whatever_a_replica_said() -> None:
    long = b"x" * 100_000
    choices = b",".join(
        b'{"index": %d, "text": "a", "finish_reason": "%b"}' % (n, long[:99]) for n in range(5_000)
    )
    answers = [
        streamed(b'{"choices": [' + choices + b"]}"),
        streamed(b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "%b"}]}' % long),
        streamed(b'{"choices": [{"index": 0, "delta": {"%b": 1}, "logprobs": 1}]}' % long),
        streamed(b'{"error": {"message": "%b"}}' % long),
    ]
    for answer in answers:
        async with behind(lambda _, answer=answer: answer) as running:  # type: ignore[misc]
            got = await running.client.post(CHAT, json=STREAM | {"n": 2})
            trace = running.traces.find(got.headers["x-argosy-request"])
            assert trace is not None
            assert len(str(trace.to_dict())) < 20_000


SEAL = b": argosy prompt 7 3\n\n"
CHUNK = b'data: {"id": "x", "created": 1, "model": "m", "choices": [%b]}\n\n'
CHOICE = b'{"index": 0, "delta": {"content": %b}, "text": "", "finish_reason": null}'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "stream",
    [
        SEAL + DONE,
        SEAL + CHUNK % (CHOICE % b"[1]") + b": argosy 0 1\n\n" + DONE,
        SEAL + b"data: 7\n\n" + DONE,
        SEAL + CHUNK % (CHOICE % b'"a"') + b": argosy 0 x\n\n" + DONE,
        SEAL + CHUNK % (CHOICE % b'"a"') + b": argosy 0 " + b"9" * 5000 + b"\n\n",
    ],
    ids=["nothing", "no text", "no chunk at its end", "no ids", "huge ids"],
)
async def test_what_cannot_be_read_is_the_replicas_failure_and_no_error_of_ours(
    stream: bytes,
) -> None:
    answer = whole(stream, b"text/event-stream")
    async with behind(lambda path: answer if path == CHAT else whole(b"{}"), "argosy") as running:
        got = await running.client.post(CHAT, json=BODY)
    assert (got.status_code, got.json()["error"]["code"]) == (502, "upstream_failed")


@pytest.mark.parametrize(
    ("bad", "stream"),
    [
        (b": argosy 0 x\n\n", True),
        (b": argosy 0 x\n\n", False),
        (b"data: 7\n\n: argosy 0 2\n\n", False),
    ],
)
async def test_an_answer_has_no_hole_where_a_piece_of_it_cannot_be_read(
    bad: bytes, *, stream: bool
) -> None:
    """Also where all of it came before anybody looked."""
    pieces = [
        SEAL + CHUNK % (CHOICE % b'"a"') + b": argosy 0 1\n\n",
        bad,
        CHUNK % (CHOICE % b'"b"') + b": argosy 0 3\n\n",
        DONE,
    ]
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    asked = BODY | {"stream": stream}
    async with behind(
        lambda path: head + body if path == CHAT else whole(b"{}"), "argosy"
    ) as running:
        got = await running.client.post(CHAT, json=asked)
    assert b"upstream_failed" in got.content
    assert b'"b"' not in got.content


async def test_text_that_is_none_is_the_servers_failure_too() -> None:
    answers = streamed(CHUNK[6:-2] % (CHOICE % b"[1]"))
    async with behind(lambda _: answers) as running:
        got = await running.client.post(CHAT, json=STREAM)
    assert b"upstream_failed" in got.content


async def test_loads_beyond_any_number_are_not_taken_and_the_replica_is_asked_again() -> None:
    name = b"vllm:num_requests_running"
    text = b"".join(b'%b{engine="%d"} 1e308\n' % (name, n) for n in range(2))
    async with behind(lambda _: whole(text, b"text/plain")) as running:
        await running.probe()
        await running.probe()
        assert running.replicas[0].load.running == 0


HUGE = b"1" + b"0" * 400
LOAD = (
    b'{"server_load": 0, "state": "ready", "models": ["big"], "running": 0, "waiting": %b, '
    b'"queued_tokens": %b, "max_seqs": %b, "max_model_len": 8192, "block_size": 16, "kv_blocks_total": %b, '
    b'"kv_blocks_used": 0, "kv_blocks_cached": 0, "step": 1, "step_s": 0.1}'
)


@pytest.mark.parametrize(
    "told",
    [
        (HUGE, b"0", b"1", b"9"),
        (b"0", HUGE, b"1", b"9"),
        (b"0", b"0", HUGE, b"9"),
        (b"0", b"0", b"-1", b"9"),
        (b"0", b"0", b"1", HUGE),
    ],
    ids=["waiting", "queued", "seats", "no seats", "blocks"],
)
async def test_a_load_of_ours_that_can_be_none_is_not_taken(told: tuple[bytes, ...]) -> None:
    def answer(path: str) -> bytes:
        return whole(LOAD % told if path == "/load" else b"{}")

    async with behind(answer, "argosy") as running:
        assert running.replicas[0].load.reported_at < 0
        assert (await running.client.post(CHAT, json=BODY)).status_code == 502


@pytest.mark.parametrize("kind", ["sglang", "tensorrt-llm"])
async def test_loads_that_nobody_has_do_not_keep_others_from_being_asked(kind: BackendKind) -> None:
    sglang = b'{"loads": [{"num_waiting_reqs": %b, "max_running_requests": -1}]}' % HUGE
    tensorrt = b'[{"numQueuedRequests": %b, "maxNumActiveRequests": -1}]' % HUGE
    told = {"/v1/loads": sglang, "/metrics": tensorrt}
    async with behind(lambda path: whole(told.get(path, b"{}")), kind) as running:
        await running.probe()
        assert (await running.client.post(CHAT, json=BODY)).is_success


async def test_a_load_of_any_length_is_not_read_while_all_others_wait() -> None:
    """Sixty megabytes of lines kept a gateway from everything else for twenty seconds, again and again."""
    full = b"vllm:num_requests_running{} 9\nvllm:num_requests_waiting{} 9\n"
    told = full.ljust(MAX_LOAD_REPORT_BYTES + 1, b"\n")
    async with behind(lambda path: whole(told if path == "/metrics" else b"{}")) as running:
        await running.probe()
        assert running.replicas[0].load.running == 0
        assert (await running.client.get("/ready")).is_success


async def test_no_more_is_kept_of_what_a_server_says_than_it_can_have_to_say() -> None:
    cards = b'{"data": [%b{"id": "big"}]}' % (b"{}," * (MAX_FETCHED_BYTES // 3))
    async with behind(lambda path: whole(cards if path == "/v1/models" else b"{}")) as running:
        assert not (await running.client.get("/ready")).is_success


async def test_a_request_that_replicas_die_of_costs_four_though_they_had_connections() -> None:
    """One that is cut at once may have been closed before the request came: not where nobody is there any more."""
    died = 0

    async def dying(stack: contextlib.AsyncExitStack) -> ReplicaConfig:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal died
            writers.append(writer)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while CHAT.encode() not in await reader.readuntil(b"\r\n\r\n"):
                    writer.write(whole(b"{}"))
                died += 1
                server.close()
                for each in writers:
                    each.transport.abort()
            writer.close()

        server = await stack.enter_async_context(await asyncio.start_server(serve, "127.0.0.1", 0))
        return ReplicaConfig(
            url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", kind="vllm"
        )

    async with contextlib.AsyncExitStack() as stack:
        replicas = [await dying(stack) for _ in range(6)]
        async with front([], *replicas) as running:
            got = await running.client.post(CHAT, json=STREAM)
    assert (got.status_code, died) == (502, 4)


@pytest.mark.parametrize("kind", ["argosy", "vllm"])
async def test_what_is_no_text_is_no_load_and_no_list(kind: BackendKind) -> None:
    told = whole(b'{"state": "\xff", "models": ["\xff"], "data": [{"id": "\xff"}]}')
    async with behind(lambda _: told, kind) as running:
        await running.probe()
