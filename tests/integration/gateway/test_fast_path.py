"""Fast path: clients get the same bytes as from the interpreter, tokens are counted, and the rest is handed back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, Script
from tests.support.fake_upstream import encode_chunk
from tests.support.gateway_client import run_gateway_server
from tests.support.gateway_harness import RecordingFilter, run_gateway
from tests.support.limit_harness import make_limit, make_snapshot
from tests.support.replica_servers import MODEL, RunningReplica, events, serve
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.filters import LimitFilter, UsageRecorder
from argosy.gateway.proxy.fast_path import FastPath, SpliceProgress, load_fast_path
from argosy.gateway.request_context import UNLIMITED_TOKENS
from argosy.store import LocalQuotaBackend, UsageLog, UsageRecord

DONE = b"data: [DONE]\n\n"


def decode_chunks(data: bytes) -> bytes:
    """Return the bodies of complete chunks."""
    bodies = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        bodies.append(rest[:length])
        data = rest[length + 2 :]
    return b"".join(bodies)


def make_event(*token_ids: int, text: str = "x", finish: str = "") -> bytes:
    event = f'data: {{"text":"{text}"}}\n\n: argosy 0 {",".join(map(str, token_ids))}'
    return event.encode() + (f" {finish}" if finish else "").encode() + b"\n\n"


@contextlib.contextmanager
def socket_pair(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection."""
    first, second = socket.socketpair(socket.AF_UNIX, kind)
    with first, second:
        first.setblocking(False)
        second.setblocking(False)
        yield first, second


@contextlib.contextmanager
def splice_stream(
    on_returned: Callable[[], object],
    kind: int = socket.SOCK_STREAM,
    output_tokens: int = 1,
    max_tokens: int = UNLIMITED_TOKENS,
    counter: ctypes.c_int64 | None = None,
) -> Iterator[tuple[FastPath, tuple[int, int], list[socket.socket]]]:
    """Splice a stream whose first tokens have been delivered.

    Yields the fast path, the stream's number and handle, and the sockets of the replica, of the gateway towards it and
    towards the client, and of the client.
    """
    fast_path = FastPath(load_fast_path())
    address = None if counter is None else ctypes.addressof(counter)
    with socket_pair(kind) as (replica, near), socket_pair() as (far, client):
        sockets = near.fileno(), far.fileno()
        stream = fast_path.attach(on_returned, *sockets, output_tokens, max_tokens, address)
        assert all(stream)
        yield fast_path, stream, [replica, near, far, client]
    fast_path.close()


class Spliced(NamedTuple):
    """Result of a splice."""

    progress: SpliceProgress
    """Progress at the end, with all bytes that were not read."""
    received: bytes
    """Bytes that the client received."""
    counted: int
    """Output tokens in the usage log's counter."""


def splice(
    sent: list[bytes],
    output_tokens: int = 1,
    max_tokens: int = UNLIMITED_TOKENS,
    send_buffer_bytes: int | None = None,
) -> Spliced:
    """Splice packets of the replica, each of which is read at once or in parts.

    `send_buffer_bytes` is the approximate send buffer of the client's socket, or None for the default.
    """

    async def run() -> Spliced:
        ended, loop, counter = asyncio.Event(), asyncio.get_running_loop(), ctypes.c_int64()
        # Packets keep their boundaries, so the test decides which bytes are read together.
        with splice_stream(
            ended.set, socket.SOCK_SEQPACKET, output_tokens, max_tokens, counter
        ) as (fast_path, stream, (replica, near, far, client)):
            if send_buffer_bytes is not None:
                far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            assert len(fast_path) == 1
            sending = asyncio.create_task(send_packets(replica, sent))
            await ended.wait()
            progress = fast_path.detach(*stream)
            assert len(fast_path) == 0
            unread, received = progress.unread, b""
            while packet := await loop.sock_recv(near, 1 << 20):
                unread += packet
            await sending
            far.close()
            while data := await loop.sock_recv(client, 1 << 20):
                received += data
        return Spliced(progress._replace(unread=unread), received, counter.value)

    return asyncio.run(run())


async def send_packets(replica: socket.socket, packets: list[bytes]) -> None:
    for packet in packets:
        await asyncio.get_running_loop().sock_sendall(replica, packet)
    replica.shutdown(socket.SHUT_WR)


IRREGULAR = st.sampled_from(
    [
        b": keep-alive\n\n",
        b": argosy prompt 7 3\n\n",
        b': argosy 1 5\n\ndata: {"other":"choice"}\n\n: argosy 1 6\n\n',
        make_event(8, 9, finish="length"),
        make_event(8, text="data: {\\n\\n: argosy 0 4"),
        b'data: {"held":"back"}\n\n',
        b": argosy 0 \n\n",
        b": argosy 0 1,,2\n\n",
        b": argosy 0 ,1\n\n",
        b"data: \xff\n\n",
        DONE,
    ]
)
REGULAR = st.builds(
    lambda token_ids, text: make_event(*token_ids, text=text),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    st.text(st.characters(exclude_characters='\n\r"\\', codec="utf-8"), max_size=300),
)


@given(
    bodies=st.lists(
        st.lists(REGULAR, min_size=1, max_size=3).map(b"".join) | IRREGULAR, max_size=12
    ),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_client_gets_same_bytes_as_from_interpreter(bodies: list[bytes], cuts: list[int]) -> None:
    raw_stream = b"".join(map(encode_chunk, bodies)) + encode_chunk(DONE)
    boundaries = sorted({0, len(raw_stream), *(cut % len(raw_stream) for cut in cuts)})
    packets = [raw_stream[a:b] for a, b in itertools.pairwise(boundaries)]
    progress, received, counted = splice(packets)

    interpreted, spliced = DeliveredOutput(output_tokens=1), DeliveredOutput(output_tokens=1)
    expected = NativeStreamParser(interpreted).feed(b"".join(bodies) + DONE)
    spliced_bytes = decode_chunks(received + progress.unsent)
    if progress.token_ids:
        spliced.token_id_pieces[0] = [progress.token_ids]
        spliced.output_tokens = progress.output_tokens
    interpreted_rest = NativeStreamParser(spliced).feed(decode_chunks(progress.unread))
    assert spliced_bytes + interpreted_rest == expected
    assert spliced.output_tokens == interpreted.output_tokens
    assert spliced.token_ids(0) == interpreted.token_ids(0)
    assert progress.output_tokens == counted or not progress.chunk_times
    assert list(progress.chunk_times) == sorted(progress.chunk_times)


@given(junk=st.binary(min_size=1, max_size=400), before=st.integers(0, 3))
def test_invalid_stream_is_handed_back_unchanged(junk: bytes, before: int) -> None:
    valid = encode_chunk(make_event(5)) * before
    progress, received, _ = splice([valid + junk])
    assert received == encode_chunk(b'data: {"text":"x"}\n\n') * (len(progress.chunk_times))
    assert len(progress.chunk_times) >= before
    assert (valid + junk).endswith(progress.unread)


@pytest.mark.parametrize(
    "size", [b"0", b"00000000a", b"g", b"-1", b"fffffffff", b"7fffffff", b"11;x=1", b" 11", b"0x11"]
)
def test_irregular_chunk_sizes_are_left_to_parser(size: bytes) -> None:
    sent = size + b"\r\n" + make_event(5) + b"\r\n"
    progress, received, _ = splice([sent])
    assert (received, progress.unread) == (b"", sent)


def test_invalid_token_ids_are_not_counted() -> None:
    """Another replica resumes the response from these ids."""
    sent = encode_chunk(make_event(5)) + encode_chunk(make_event(6, 12345678901))
    progress, _, _ = splice([sent])
    assert (progress.token_ids, progress.unread) == (b"5", encode_chunk(make_event(6, 12345678901)))


def test_splice_ends_before_token_limit_is_exceeded() -> None:
    last = encode_chunk(make_event(12)) + encode_chunk(make_event(13))
    sent = [encode_chunk(make_event(10, 11)), last, encode_chunk(DONE)]
    progress, _, counted = splice(sent, output_tokens=3, max_tokens=6)
    assert (progress.output_tokens, progress.token_ids, counted) == (6, b"10,11,12", 6)
    assert progress.unread == encode_chunk(make_event(13)) + encode_chunk(DONE)


def test_bytes_not_taken_by_slow_client_are_handed_back() -> None:
    text = "y" * 3000
    sent = [encode_chunk(make_event(index, text=text)) for index in range(200)]
    progress, received, _ = splice(sent, send_buffer_bytes=8192)
    assert progress.unsent
    event_count = len(progress.chunk_times)
    assert 0 < event_count < 200
    assert (
        received + progress.unsent
        == encode_chunk(make_event(1, text=text).split(b": argosy")[0]) * event_count
    )
    assert progress.unread == b"".join(sent[event_count:])
    assert progress.token_ids == b",".join(b"%d" % index for index in range(event_count))


async def test_disconnected_client_ends_splice() -> None:
    ended = asyncio.Event()
    with splice_stream(ended.set) as (fast_path, stream, (replica, _, _, client)):
        client.close()
        replica.sendall(encode_chunk(make_event(4)))
        await ended.wait()
        progress = fast_path.detach(*stream)
    assert decode_chunks(progress.unsent) == b'data: {"text":"x"}\n\n'


async def test_duplicated_descriptors_are_closed() -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    loop, before = asyncio.get_running_loop(), descriptors()
    for _ in range(20):
        with splice_stream(lambda: None) as (fast_path, stream, (replica, near, far, client)):
            near.close()
            far.close()  # the numbers may be reused by now
            replica.sendall(encode_chunk(make_event(4)))
            assert await loop.sock_recv(client, 1000)
            fast_path.detach(*stream)
            # No other descriptor of the other ends is open.
            assert await loop.sock_recv(client, 1000) == b""
            assert await loop.sock_recv(replica, 1000) == b""
    assert descriptors() == before


async def test_returned_sockets_are_released() -> None:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    with splice_stream(ended.set) as (fast_path, stream, (replica, near, far, client)):
        near.close()
        far.close()
        replica.sendall(encode_chunk(DONE))
        assert await loop.sock_recv(client, 1000) == b""
        assert await loop.sock_recv(replica, 1000) == b""
        await ended.wait()
        assert fast_path.detach(*stream).unread == encode_chunk(DONE)


async def test_half_received_chunk_is_handed_back() -> None:
    with splice_stream(lambda: None) as (fast_path, stream, (replica, _, _, client)):
        partial = encode_chunk(make_event(5))[:20]
        replica.sendall(encode_chunk(make_event(4)) + partial)
        assert await asyncio.get_running_loop().sock_recv(client, 1000)
        progress = fast_path.poll_progress(stream[1])
        assert (progress.token_ids, progress.output_tokens, progress.unread) == (b"4", 2, b"")
        assert fast_path.detach(*stream).unread == partial


async def test_failing_callback_does_not_affect_other_streams() -> None:
    loop, failed, other_returned = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())
    with splice_stream(lambda: 1 / 0) as (fast_path, stream, (replica, near, far, _)):
        other = fast_path.attach(
            other_returned.set, near.fileno(), far.fileno(), 1, UNLIMITED_TOKENS, None
        )
        replica.close()
        await failed.wait()
        await other_returned.wait()
        for each in (stream, other):
            fast_path.detach(*each)


async def test_close_hands_back_all_streams() -> None:
    handed_back: list[SpliceProgress] = []

    def on_returned() -> None:
        handed_back.append(fast_path.detach(*stream))

    with splice_stream(on_returned) as (fast_path, stream, _):
        pass
    assert (len(fast_path), len(handed_back)) == (0, 1)


# --- in the gateway -------------------------------------------------------------------------------

TOKENS = list(range(100, 160))
BODY: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 60,
    "stream": True,
    "return_token_ids": True,
}
PATH = "/v1/chat/completions"


def make_pausing_engine(tokenizer: Tokenizer, after: int | None = 20) -> FakeEngine:
    return FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=after))


def token_ids(response: bytes) -> list[int]:
    *chunks, done = events(response)
    assert done == b"[DONE]"
    return list(chunk_token_ids(chunks))


def chunk_token_ids(chunks: list[bytes]) -> Iterator[int]:
    for chunk in map(json.loads, chunks):
        for choice in chunk["choices"]:
            yield from choice.get("token_ids") or ()


def replica_config(served: RunningReplica) -> ReplicaConfig:
    return ReplicaConfig(url=served.url, model=MODEL)


async def test_stream_enters_fast_path_and_returns(tokenizer: Tokenizer) -> None:
    engine, recorder = make_pausing_engine(tokenizer), RecordingFilter()
    async with serve(engine) as served, run_gateway([recorder], replica_config(served)) as gateway:
        task = asyncio.create_task(gateway.client.post(PATH, json=BODY))
        await engine.paused.wait()
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        engine.may_continue.set()
        response = await task
    assert token_ids(response.content) == TOKENS
    (context,) = recorder.completed
    assert context.delivered.output_tokens == 60
    assert context.delivered.token_ids(0) == TOKENS
    assert len(recorder.token_counts) < 30  # otherwise the stream was not spliced


async def test_spliced_stream_is_resumed_after_replica_failure(tokenizer: Tokenizer) -> None:
    crashing = Script(TOKENS[:20], pause_after=20, crash=RuntimeError("gone"))
    failing_engine, other_engine = (
        FakeEngine(tokenizer, lambda _: crashing),
        make_pausing_engine(tokenizer, None),
    )
    recorder = RecordingFilter()
    async with (
        serve(failing_engine) as one,
        serve(other_engine) as two,
        run_gateway([recorder], replica_config(one), replica_config(two)) as gateway,
    ):
        tasks = [asyncio.create_task(gateway.client.post(PATH, json=BODY)) for _ in range(2)]
        await failing_engine.paused.wait()
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        failing_engine.may_continue.set()
        for response in await asyncio.gather(*tasks):
            assert token_ids(response.content) == TOKENS
    attempt_counts = sorted(len(context.trace.attempts) for context in recorder.completed)
    assert attempt_counts == [1, 2]
    assert [
        request.resumed_tokens for request in other_engine.requests if request.resumed_tokens
    ] == [TOKENS[:20]]


async def test_disconnect_of_spliced_client_cancels_request(tokenizer: Tokenizer) -> None:
    engine, recorder = make_pausing_engine(tokenizer), RecordingFilter()
    async with serve(engine) as served, run_gateway([recorder], replica_config(served)) as gateway:
        async with gateway.client.stream("POST", PATH, json=BODY):
            await engine.paused.wait()
            await until(lambda: gateway.handlers.fast_path_streams == 1)
            await until(lambda: recorder.started[0].delivered.output_tokens == 20)
        await recorder.completions.acquire()
        assert gateway.handlers.fast_path_streams == 0
        await engine.wait_idle()  # the replica has noticed the disconnect
    (context,) = recorder.completed
    assert (context.status, context.delivered.output_tokens) == ("cancelled", 20)


async def test_connection_close_is_honoured_after_splice(tokenizer: Tokenizer) -> None:
    engine = make_pausing_engine(tokenizer, None)
    async with serve(engine) as served, run_gateway([], replica_config(served)) as gateway:
        url = gateway.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(BODY).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        response = await reader.read()  # until the connection ends
        writer.close()
    assert token_ids(decode_chunks(response.partition(b"\r\n\r\n")[2])) == TOKENS


async def test_usage_is_counted_before_filters_are_notified(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine, recorder, usage_log = (
        make_pausing_engine(tokenizer),
        RecordingFilter(),
        UsageLog(tmp_path),
    )
    async with (
        serve(engine) as served,
        run_gateway([UsageRecorder(usage_log), recorder], replica_config(served)) as gateway,
    ):
        task = asyncio.create_task(gateway.client.post(PATH, json=BODY))
        await engine.paused.wait()
        context = recorder.started[0]
        assert context.usage_slot is not None
        counter = ctypes.c_int64.from_address(context.usage_slot.output_counter_address)
        await until(lambda: counter.value == 20)
        await until(lambda: context.delivered.output_tokens == recorder.token_counts[-1] == 20)
        engine.may_continue.set()
        await task
        assert recorder.token_counts[-1] == 60
    records: list[UsageRecord] = []
    usage_log.drain(records.extend)
    usage_log.close()
    assert [record.output_tokens for record in records] == [60]


@pytest.mark.parametrize(("setting", "warnings"), [("off", 0), ("auto", 1)])
async def test_streams_work_without_fast_path(
    setting: Literal["auto", "off"],
    warnings: int,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")  # no compiler
    engine = make_pausing_engine(tokenizer)
    async with serve(engine) as served:
        models = [ModelConfig(name="big", replicas=[replica_config(served)])]
        config = GatewayConfig(port=0, models=models, fast_path=setting)
        with capture_logs() as logs:
            async with run_gateway_server(config) as (_, client):
                task = asyncio.create_task(client.post(PATH, json=BODY))
                await engine.paused.wait()
                metrics = await client.get("/metrics")
                engine.may_continue.set()
                response = await task
    assert token_ids(response.content) == TOKENS
    assert "argosy_gateway_fast_path_streams 0.0" in metrics.text.splitlines()
    reasons = [entry["reason"] for entry in logs if entry["event"] == "fast_path_unavailable"]
    assert len(reasons) == warnings
    assert all("install g++" in reason for reason in reasons)


async def test_created_limit_takes_the_stream_back_and_stops_it(tokenizer: Tokenizer) -> None:
    engine, recorder = make_pausing_engine(tokenizer), RecordingFilter()
    limits = LimitFilter(LocalQuotaBackend())
    created = make_limit("output_tokens", 12, "day", "organisation")
    async with (
        serve(engine) as served,
        run_gateway([limits, recorder], replica_config(served)) as gateway,
    ):
        task = asyncio.create_task(gateway.client.post(PATH, json=BODY))
        await engine.paused.wait()
        await until(lambda: gateway.handlers.fast_path_streams == 1)
        limits.apply_snapshot(make_snapshot(msgspec.structs.replace(created, owner="")))
        assert gateway.handlers.fast_path_streams == 0
        tokens_at_change = recorder.started[0].delivered.output_tokens
        engine.may_continue.set()
        *_, final, _ = events((await task).content)
    assert json.loads(final)["choices"][0]["stop_reason"] == "limit"
    (context,) = recorder.completed
    assert 12 < context.delivered.output_tokens - tokens_at_change < 40
