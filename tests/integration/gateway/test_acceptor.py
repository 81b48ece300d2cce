"""Who is let in when many come at once, and when there is no room for one more."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from unittest import mock

import psutil
import pytest
import uvloop

from argosy.http_server import HttpServer, Receive, Scope, Send, bind_tcp, bind_unix
from argosy.http_server import server as listen_module
from argosy.http_server.acceptor import UnixListenSocket

ASKED = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
SERVER = """
import uvloop
from argosy.http_server import HttpServer, bind_tcp

async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

async def main():
    bound = bind_tcp("127.0.0.1", 0)
    print(bound.getsockname()[1], flush=True)
    await HttpServer(hello).serve(sockets=[bound])

uvloop.run(main())
"""


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Nobody asks."""


def test_all_who_wait_are_let_in_within_a_few_turns_of_the_loop() -> None:
    """The loop itself takes one a turn: on a busy loop the last of them would wait for seconds."""
    many = 100

    async def turns() -> int:
        listener, bound = HttpServer(nothing), bind_tcp("127.0.0.1", 0)
        with ExitStack() as clients:
            for _ in range(many):
                clients.enter_context(closing(socket.create_connection(bound.getsockname())))
            running = asyncio.create_task(listener.serve(sockets=[bound]))
            count = 0
            while len(listener.server_state.connections) < many and count < 10 * many:
                count += 1
                await asyncio.sleep(0)
        listener.stop()
        await running
        return count

    assert uvloop.run(turns()) < many / 3


async def test_who_comes_once_it_is_closed_is_refused_and_does_not_wait() -> None:
    listener, bound = HttpServer(nothing), bind_tcp("127.0.0.1", 0)
    address = bound.getsockname()
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    _, writer = await asyncio.open_connection(*address)
    for each in listener.servers:
        each.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    writer.close()
    listener.stop()
    await running


def test_a_path_that_is_not_listened_on_after_all_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[socket.socket] = []

    def refuse(unix: socket.socket, _: int) -> None:
        bound.append(unix)
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(UnixListenSocket, "listen", refuse, raising=False)
    with pytest.raises(OSError, match="choose another path"):
        bind_unix(tmp_path / "a.sock")
    assert bound[0].fileno() == -1
    assert not (tmp_path / "a.sock").exists()


async def test_who_is_let_in_and_cannot_be_served_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: failures.append(told))
    monkeypatch.setattr(listen_module, "Connection", mock.Mock(side_effect=ValueError("no")))
    listener, bound = HttpServer(nothing), bind_tcp("127.0.0.1", 0)
    running = asyncio.create_task(listener.serve(sockets=[bound]))
    reader, writer = await asyncio.open_connection(*bound.getsockname())
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    listener.should_exit = True
    await running


@pytest.fixture
def server() -> Iterator[tuple[psutil.Process, int]]:
    """A process that answers "hello", and its port."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        yield psutil.Process(child.pid), int(child.stdout.readline())
        child.kill()


def test_who_finds_no_room_is_let_in_when_somebody_has_left(
    server: tuple[psutil.Process, int],
) -> None:
    process, port = server
    with closing(socket.create_connection(("127.0.0.1", port))) as first:
        first.sendall(ASKED)
        assert first.recv(4096).startswith(b"HTTP/1.1 200 OK")
    hard = process.rlimit(resource.RLIMIT_NOFILE)[1]
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + 10, hard))
    with ExitStack() as clients:
        for _ in range(40):
            clients.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
        late = socket.create_connection(("127.0.0.1", port), timeout=30)
        late.sendall(ASKED)
    with closing(late):
        assert late.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert process.is_running()
