"""The fast path gives the client what the interpreter would have given it, counts it, and hands back the rest."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import itertools
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Watching, front
from tests.support.replica_servers import MODEL, Served, events, serve
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.native_stream_parser import NativeStreamParser
from argosy.gateway.proxy.fast_path import FastPath, SplicedStream, SpliceProgress, load_fast_path
from argosy.gateway.proxy.response_relay import ResponseRelay
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.request_context import UNLIMITED_TOKENS
from argosy.http_server import HttpExchange

DONE = b"data: [DONE]\n\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def dechunked(data: bytes) -> bytes:
    """The bodies of whole chunks."""
    bodies = []
    while data:
        size, _, rest = data.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        bodies.append(rest[:length])
        data = rest[length + 2 :]
    return b"".join(bodies)


def piece(*ids: int, text: str = "x", finish: str = "") -> bytes:
    told = f'data: {{"text":"{text}"}}\n\n: argosy 0 {",".join(map(str, ids))}'
    return told.encode() + (f" {finish}" if finish else "").encode() + b"\n\n"


@contextlib.contextmanager
def ends(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Of a connection."""
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@dataclass
class Lane:
    """A replica and a client with the fast path between them."""

    output: int = 1
    most: int = UNLIMITED_TOKENS
    room: int | None = None
    """Bytes that the client's socket takes, about; None: plenty."""
    word: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    got: bytes = b""
    """What the client has."""

    async def pass_on(self, sent: list[bytes]) -> SpliceProgress:
        """What is told in the end, when the replica has sent these: each is read at once, or in parts."""
        # Packets keep their borders, so what is read together is ours to say.
        with ends(socket.SOCK_SEQPACKET) as (replica, near), ends() as (far, client):
            return await self._pass_on(sent, replica, near, far, client)

    async def _pass_on(
        self,
        sent: list[bytes],
        replica: socket.socket,
        near: socket.socket,
        far: socket.socket,
        client: socket.socket,
    ) -> SpliceProgress:
        if self.room is not None:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.room)
        path, ended = FastPath(load_fast_path()), asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            ride = path.attach(
                near.fileno(),
                far.fileno(),
                output_tokens=self.output,
                max_output_tokens=self.most,
                token_counter_address=ctypes.addressof(self.word),
                on_returned=ended.set,
            )
            assert ride is not None
            assert len(path) == 1
            sending = asyncio.create_task(_send(replica, sent))
            await ended.wait()
            news = ride.detach()
            assert len(path) == 0
        finally:
            path.close()
        unread = []
        while packet := await loop.sock_recv(near, 1 << 20):
            unread.append(packet)
        await sending
        far.close()
        while data := await loop.sock_recv(client, 1 << 20):
            self.got += data
        return news._replace(unread=news.unread + b"".join(unread))


async def _send(replica: socket.socket, packets: list[bytes]) -> None:
    for packet in packets:
        await asyncio.get_running_loop().sock_sendall(replica, packet)
    replica.shutdown(socket.SHUT_WR)


def passed(lane: Lane, sent: list[bytes]) -> SpliceProgress:
    return asyncio.run(lane.pass_on(sent))


ODD = st.sampled_from(
    [
        b": keep-alive\n\n",
        b": argosy prompt 7 3\n\n",
        b': argosy 1 5\n\ndata: {"other":"choice"}\n\n: argosy 1 6\n\n',
        piece(8, 9, finish="length"),
        piece(8, text="data: {\\n\\n: argosy 0 4"),
        b'data: {"held":"back"}\n\n',
        b": argosy 0 \n\n",
        b": argosy 0 1,,2\n\n",
        b": argosy 0 ,1\n\n",
        b"data: \xff\n\n",
        DONE,
    ]
)
REGULAR = st.builds(
    lambda ids, text: piece(*ids, text=text),
    st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    st.text(st.characters(exclude_characters='\n\r"\\', codec="utf-8"), max_size=300),
)


@given(
    bodies=st.lists(st.lists(REGULAR, min_size=1, max_size=3).map(b"".join) | ODD, max_size=12),
    cuts=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_the_client_gets_what_it_would_have_got(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(chunk, bodies)) + chunk(DONE)
    borders = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    lane = Lane()
    news = passed(lane, [stream[a:b] for a, b in itertools.pairwise(borders)])

    alone, beside = DeliveredOutput(output_tokens=1), DeliveredOutput(output_tokens=1)
    all_told = NativeStreamParser(alone).feed(b"".join(bodies) + DONE)
    told_there = dechunked(lane.got + news.unsent)
    if news.token_ids:
        beside.token_id_pieces[0] = [news.token_ids]
        beside.output_tokens = news.output_tokens
    told_here = NativeStreamParser(beside).feed(dechunked(news.unread))
    assert told_there + told_here == all_told
    assert beside.output_tokens == alone.output_tokens
    assert beside.token_ids(0) == alone.token_ids(0)
    assert news.output_tokens == lane.word.value or not news.chunk_times
    assert list(news.chunk_times) == sorted(news.chunk_times)


@given(junk=st.binary(min_size=1, max_size=400), before=st.integers(0, 3))
def test_what_is_no_chunk_of_a_journal_is_handed_back_as_it_came(junk: bytes, before: int) -> None:
    good = chunk(piece(5)) * before
    lane = Lane()
    news = passed(lane, [good + junk])
    assert lane.got == chunk(b'data: {"text":"x"}\n\n') * (len(news.chunk_times))
    assert len(news.chunk_times) >= before
    assert (good + junk).endswith(news.unread)


@pytest.mark.parametrize(
    "size", [b"0", b"00000000a", b"g", b"-1", b"fffffffff", b"7fffffff", b"11;x=1", b" 11", b"0x11"]
)
def test_odd_sizes_are_for_the_parser(size: bytes) -> None:
    sent = size + b"\r\n" + piece(5) + b"\r\n"
    lane = Lane()
    news = passed(lane, [sent])
    assert (lane.got, news.unread) == (b"", sent)


def test_ids_that_are_none_are_not_taken_for_some() -> None:
    """An answer is carried on from them elsewhere."""
    sent = chunk(piece(5)) + chunk(piece(6, 12345678901))
    lane = Lane()
    news = passed(lane, [sent])
    assert (news.token_ids, news.unread) == (b"5", chunk(piece(6, 12345678901)))


def test_it_ends_before_it_has_more_tokens_than_it_may() -> None:
    lane = Lane(output=3, most=6)
    news = passed(lane, [chunk(piece(10, 11)), chunk(piece(12)) + chunk(piece(13)), chunk(DONE)])
    assert (news.output_tokens, news.token_ids, lane.word.value) == (6, b"10,11,12", 6)
    assert news.unread == chunk(piece(13)) + chunk(DONE)


def test_what_a_slow_client_does_not_take_is_handed_back() -> None:
    text = "y" * 3000
    sent = [chunk(piece(place, text=text)) for place in range(200)]
    lane = Lane(room=8192)
    news = passed(lane, sent)
    assert news.unsent
    pieces = len(news.chunk_times)
    assert 0 < pieces < 200
    assert lane.got + news.unsent == chunk(piece(1, text=text).split(b": argosy")[0]) * pieces
    assert news.unread == b"".join(sent[pieces:])
    assert news.token_ids == b",".join(b"%d" % place for place in range(pieces))


def test_a_client_that_is_gone_ends_it() -> None:
    async def go() -> SpliceProgress:
        path, ended = FastPath(load_fast_path()), asyncio.Event()
        with ends() as (replica, near), ends() as (far, client):
            client.close()
            ride = path.attach(
                near.fileno(),
                far.fileno(),
                output_tokens=1,
                max_output_tokens=UNLIMITED_TOKENS,
                token_counter_address=None,
                on_returned=ended.set,
            )
            assert ride is not None
            replica.sendall(chunk(piece(4)))
            await ended.wait()
            news = ride.detach()
        path.close()
        return news

    news = asyncio.run(go())
    assert dechunked(news.unsent) == b'data: {"text":"x"}\n\n'


def test_its_descriptors_are_its_own_and_are_closed() -> None:
    async def go() -> None:
        path, loop = FastPath(load_fast_path()), asyncio.get_running_loop()
        for _ in range(50):
            with ends() as (replica, near), ends() as (far, client):
                ride = path.attach(
                    near.fileno(),
                    far.fileno(),
                    output_tokens=1,
                    max_output_tokens=UNLIMITED_TOKENS,
                    token_counter_address=None,
                    on_returned=never,
                )
                assert ride is not None
                near.close()
                far.close()  # elsewhere: the numbers may be another's by now
                replica.sendall(chunk(piece(4)))
                assert await loop.sock_recv(client, 1000)
                ride.detach()
                assert await loop.sock_recv(client, 1000) == b""  # nobody else has the other end
                assert await loop.sock_recv(replica, 1000) == b""
        path.close()

    def never() -> None:
        raise AssertionError

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    asyncio.run(go())
    assert descriptors() == before


async def test_what_it_gives_back_it_has_no_longer() -> None:
    path, ended = FastPath(load_fast_path()), asyncio.Event()
    with ends() as (replica, near), ends() as (far, client):
        ride = path.attach(
            near.fileno(),
            far.fileno(),
            output_tokens=1,
            max_output_tokens=UNLIMITED_TOKENS,
            token_counter_address=None,
            on_returned=ended.set,
        )
        assert ride is not None
        near.close()
        far.close()
        replica.sendall(chunk(DONE))
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(client, 1000) == b""
        assert await loop.sock_recv(replica, 1000) == b""
        await ended.wait()
        assert ride.detach().unread == chunk(DONE)
    path.close()


async def test_what_is_half_read_is_told_when_it_is_over() -> None:
    path = FastPath(load_fast_path())
    with ends() as (replica, near), ends() as (far, client):
        ride = path.attach(
            near.fileno(),
            far.fileno(),
            output_tokens=1,
            max_output_tokens=UNLIMITED_TOKENS,
            token_counter_address=None,
            on_returned=lambda: None,
        )
        assert ride is not None
        half = chunk(piece(5))[:20]
        replica.sendall(chunk(piece(4)) + half)
        assert await asyncio.get_running_loop().sock_recv(client, 1000)
        news = ride.poll_progress()
        assert (news.token_ids, news.output_tokens, news.unread) == (b"4", 2, b"")
        assert ride.detach().unread == half
    path.close()


async def test_one_stream_that_cannot_be_taken_back_costs_no_other() -> None:
    path, loop = FastPath(load_fast_path()), asyncio.get_running_loop()
    failed, went_on = asyncio.Event(), asyncio.Event()
    loop.set_exception_handler(lambda *_: failed.set())

    def fail() -> None:
        raise RuntimeError

    with ends() as (replica, near), ends() as (far, _client):
        rides = [
            path.attach(
                near.fileno(),
                far.fileno(),
                output_tokens=1,
                max_output_tokens=UNLIMITED_TOKENS,
                token_counter_address=None,
                on_returned=ended,
            )
            for ended in (fail, went_on.set)
        ]
        replica.close()
        await failed.wait()
        await went_on.wait()
        for ride in rides:
            assert ride is not None
            ride.detach()
    path.close()


async def test_it_gives_all_back_when_it_is_closed() -> None:
    path = FastPath(load_fast_path())
    rides: list[SplicedStream] = []
    given: list[SpliceProgress] = []
    with ends() as (_replica, near), ends() as (far, _client):
        ride = path.attach(
            near.fileno(),
            far.fileno(),
            output_tokens=1,
            max_output_tokens=UNLIMITED_TOKENS,
            token_counter_address=None,
            on_returned=lambda: given.append(rides[0].detach()),
        )
        assert ride is not None
        rides.append(ride)
        path.close()
    assert (len(path), len(given)) == (0, 1)


# --- behind the front ------------------------------------------------------------------------------

TOKENS = list(range(100, 160))
CHAT: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 60,
    "stream": True,
    "return_token_ids": True,
}
PATH = "/v1/chat/completions"


def pausing(tokenizer: Tokenizer, after: int | None = 20) -> FakeEngine:
    return FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length", pause_after=after))


def ids(answer: bytes) -> list[int]:
    *chunks, done = events(answer)
    assert done == b"[DONE]"
    return list(_ids(chunks))


def _ids(chunks: list[bytes]) -> Iterator[int]:
    for told in map(json.loads, chunks):
        for choice in told["choices"]:
            yield from choice.get("token_ids") or ()


def replica(served: Served) -> ReplicaConfig:
    return ReplicaConfig(url=served.url, model=MODEL)


async def test_a_stream_goes_by_it_and_comes_back(tokenizer: Tokenizer) -> None:
    engine, watching = pausing(tokenizer), Watching()
    async with serve(engine) as served, front([watching], replica(served)) as running:
        asked = asyncio.create_task(running.client.post(PATH, json=CHAT))
        await engine.paused.wait()
        await until(lambda: running.serving.fast_path_streams == 1)
        engine.go_on.set()
        answer = await asked
    assert ids(answer.content) == TOKENS
    (context,) = watching.left
    assert context.delivered.output_tokens == 60
    assert context.delivered.token_ids(0) == TOKENS
    assert len(watching.counts) < 30  # else it did not


async def test_its_replica_fails_and_another_goes_on(tokenizer: Tokenizer) -> None:
    crashing = Script(TOKENS[:20], pause_after=20, crash=RuntimeError("gone"))
    failing, heir = FakeEngine(tokenizer, lambda _: crashing), pausing(tokenizer, None)
    watching = Watching()
    async with (
        serve(failing) as one,
        serve(heir) as two,
        front([watching], replica(one), replica(two)) as running,
    ):
        asked = [asyncio.create_task(running.client.post(PATH, json=CHAT)) for _ in range(2)]
        await failing.paused.wait()
        await until(lambda: running.serving.fast_path_streams == 1)
        failing.go_on.set()
        for answer in await asyncio.gather(*asked):
            assert ids(answer.content) == TOKENS
    tries = sorted(len(context.trace.attempts) for context in watching.left)
    assert tries == [1, 2]
    assert [request.resumed_tokens for request in heir.requests if request.resumed_tokens] == [
        TOKENS[:20]
    ]


async def test_its_client_leaves(tokenizer: Tokenizer) -> None:
    engine, watching = pausing(tokenizer), Watching()
    async with serve(engine) as served, front([watching], replica(served)) as running:
        async with running.client.stream("POST", PATH, json=CHAT):
            await engine.paused.wait()
            await until(lambda: running.serving.fast_path_streams == 1)
            await until(lambda: watching.entered[0].delivered.output_tokens == 20)
        await watching.gone.acquire()
        assert running.serving.fast_path_streams == 0
        await engine.nothing_runs()  # the replica has learned of it
    (context,) = watching.left
    assert (context.status, context.delivered.output_tokens) == ("cancelled", 20)


async def test_a_client_that_wants_no_more_requests_is_let_go(tokenizer: Tokenizer) -> None:
    engine = pausing(tokenizer, None)
    async with serve(engine) as served, front([], replica(served)) as running:
        url = running.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port)
        body = json.dumps(CHAT).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()  # until the connection ends
        writer.close()
    assert ids(dechunked(answer.partition(b"\r\n\r\n")[2])) == TOKENS


async def test_whoever_counts_in_a_word_is_told_at_the_end(tokenizer: Tokenizer) -> None:
    word = ctypes.c_int64()
    engine, watching = pausing(tokenizer), Watching(counter=ctypes.addressof(word))
    async with serve(engine) as served, front([watching], replica(served)) as running:
        asked = asyncio.create_task(running.client.post(PATH, json=CHAT))
        await until(lambda: word.value == 20)
        context = watching.entered[0]
        await until(lambda: context.delivered.output_tokens == 20)
        assert watching.counts[-1] < 20
        engine.go_on.set()
        await asked
    assert (word.value, watching.counts[-1]) == (59, 60)  # the last piece comes with the end


def test_what_was_lent_counts_as_told() -> None:
    out = StreamingWriter(Mock(spec=HttpExchange))
    assert out.discard()
    out.lend_socket()
    assert not out.discard()


@pytest.mark.parametrize(("setting", "told"), [("off", 0), ("auto", 1)])
async def test_where_it_is_not_streams_pass_as_ever(
    setting: Literal["auto", "off"],
    told: int,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")  # no compiler
    engine = pausing(tokenizer)
    async with serve(engine) as served:
        models = [ModelConfig(name="big", replicas=[replica(served)])]
        config = GatewayConfig(port=0, models=models, fast_path=setting)
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        with capture_logs() as logs:
            server = GatewayServer(config, url.set_result)
            running = asyncio.create_task(server.run())
            async with httpx2.AsyncClient(base_url=await url, timeout=30) as client:
                asked = asyncio.create_task(client.post(PATH, json=CHAT))
                await engine.paused.wait()
                metrics = await client.get("/metrics")
                engine.go_on.set()
                answer = await asked
            server.stop()
            await running
    assert ids(answer.content) == TOKENS
    assert "argosy_gateway_fast_path_streams 0.0" in metrics.text.splitlines()
    reasons = [entry["reason"] for entry in logs if entry["event"] == "fast_path_unavailable"]
    assert len(reasons) == told
    assert all("install g++" in reason for reason in reasons)


async def test_streams_leave_nothing_for_the_garbage_collector(tokenizer: Tokenizer) -> None:
    engine = pausing(tokenizer, None)
    gc.collect()
    gc.disable()
    try:
        async with serve(engine) as served, front([], replica(served)) as running:
            for _ in range(5):
                await running.client.post(PATH, json=CHAT)
        left = [each for each in gc.get_objects() if type(each) is ResponseRelay]
    finally:
        gc.enable()
    assert not left
