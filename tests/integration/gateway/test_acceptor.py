"""Accepting of connections: bursts, shutdown, failures, and exhausted file descriptors."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvloop
from structlog.testing import capture_logs
from tests.support.http_serving import run_server
from tests.support.waiting import is_listening, until

from argosy.http_server import (
    HttpRequest,
    HttpServer,
    SocketHandover,
    acceptor,
    bind_host,
    bind_tcp,
    bind_unix,
    listening_sockets,
)
from argosy.http_server import server as server_module
from argosy.http_server.acceptor import UnixListenSocket, close_listen_socket

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def respond(request: HttpRequest) -> None:
    request.transport.send_response(200, [(b"content-length", b"0")], b"")


async def unused_app(request: HttpRequest) -> None:
    """Never called, since no client sends a request."""


def test_burst_of_connections_is_accepted_within_few_iterations() -> None:
    """The loop itself accepts one per iteration, so on a busy loop the last client would wait for seconds."""
    client_count = 100

    async def count_iterations() -> int:
        server, listen_socket = HttpServer(unused_app), bind_tcp("127.0.0.1", 0)
        with ExitStack() as clients:
            for _ in range(client_count):
                clients.enter_context(
                    closing(socket.create_connection(listen_socket.getsockname()))
                )
            task = asyncio.create_task(server.serve(sockets=[listen_socket]))
            count = 0
            while server.connection_count < client_count and count < 10 * client_count:
                count += 1
                await asyncio.sleep(0)
        server.stop()
        await task
        return count

    assert uvloop.run(count_iterations()) < client_count / 3


async def test_connection_after_close_is_refused_immediately() -> None:
    async with run_server(unused_app) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        server.stop_accepting()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        writer.close()


def test_failed_listen_on_unix_path_leaves_no_socket_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen_socket: list[socket.socket] = []

    def fail_listen(unix_socket: socket.socket, _: int) -> None:
        listen_socket.append(unix_socket)
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(UnixListenSocket, "listen", fail_listen, raising=False)
    with pytest.raises(OSError, match="choose another path"):
        bind_unix(tmp_path / "a.sock")
    assert listen_socket[0].fileno() == -1
    assert not (tmp_path / "a.sock").exists()


def test_closed_server_leaves_socket_of_its_successor(tmp_path: Path) -> None:
    """The successor has bound the path while the server drained, or has replaced the file."""
    path = tmp_path / "a.sock"
    for drains in (True, False):
        with ExitStack() as successor:
            with listening_sockets("", 0, str(path)) as (draining,):
                if drains:
                    close_listen_socket(draining)
                else:
                    path.unlink()
                successor.enter_context(listening_sockets("", 0, str(path)))
            assert is_listening(path)
        assert not path.exists()


ALL_IPV4 = "0.0.0.0"  # noqa: S104 - a test of it


def find_loopbacks() -> list[str]:
    """Return the loopback addresses of the families that this machine has."""
    found = ["127.0.0.1", "127.0.0.2"]
    with suppress(OSError):
        bind_tcp("::1", 0).close()
        found.append("::1")
    return found


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("localhost", {"127.0.0.1", "::1"}),
        ("::", {"127.0.0.1", "::1", "127.0.0.2"}),
        ("", {"127.0.0.1", "::1", "127.0.0.2"}),
        (ALL_IPV4, {"127.0.0.1", "127.0.0.2"}),
        ("127.0.0.1", {"127.0.0.1"}),
    ],
)
def test_host_is_reached_at_the_addresses_of_both_families(host: str, reached: set[str]) -> None:
    with listening_sockets(host, 0, None) as sockets:
        (port,) = {each.getsockname()[1] for each in sockets}
        found = set()
        for address in ("127.0.0.1", "127.0.0.2", "::1"):
            with (
                suppress(ConnectionRefusedError),
                socket.create_connection((address, port)) as client,
            ):
                found.add(client.getpeername()[0])
        assert found == reached.intersection(find_loopbacks())
        with pytest.raises(OSError, match=r"cannot listen on .*choose another --port"):
            bind_host(host, port)


async def test_successor_serves_connections_that_wait_at_a_handed_over_socket(
    tmp_path: Path,
) -> None:
    """Without the handover, the system would reset them when the predecessor ends."""
    folder = tmp_path / ("folder" * 20)
    folder.mkdir()
    path = folder / "handover"

    def open_successor(stack: ExitStack, port: int, host: str = "::") -> list[socket.socket]:
        return stack.enter_context(listening_sockets(host, port, None, path))

    with ExitStack() as stack, ExitStack() as predecessor:
        old = open_successor(predecessor, 0)
        offer = SocketHandover(path, old)
        assert path.stat().st_mode & 0o777 == 0o600
        port = old[0].getsockname()[1]
        other = await asyncio.to_thread(open_successor, stack, 0)
        assert other[0].getsockname()[1] != port
        (only_ipv4,) = await asyncio.to_thread(open_successor, stack, port, ALL_IPV4)
        assert only_ipv4.getsockname() == (ALL_IPV4, port)
        new = await asyncio.to_thread(open_successor, stack, port)
        successor_offer = SocketHandover(path, new)
        clients = [
            stack.enter_context(socket.create_connection((address, port)))
            for address in find_loopbacks()
        ]
        for client in clients:
            client.sendall(REQUEST)
        offer.close()
        predecessor.close()
        assert path.is_socket()
        server = HttpServer(respond)
        task = asyncio.create_task(server.serve(sockets=new))
        for client in clients:
            response = await asyncio.to_thread(client.makefile("rb").read)
            assert response.startswith(b"HTTP/1.1 200 ")
        server.stop()
        await task
        successor_offer.close()
        assert not path.exists()


async def test_connections_waiting_for_accept_are_served_while_server_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = acceptor.Acceptor._open_connection  # noqa: SLF001 - made slow, as on a busy machine

    async def open_late(self: acceptor.Acceptor, *arguments: Any) -> None:  # noqa: ANN401 - as the original
        for _ in range(10):
            await asyncio.sleep(0)
        await original(self, *arguments)

    monkeypatch.setattr(acceptor.Acceptor, "_open_connection", open_late)
    answered = []

    async def respond_and_count(request: HttpRequest) -> None:
        await respond(request)
        answered.append(request)

    server, listen_socket = HttpServer(respond_and_count), bind_tcp("127.0.0.1", 0)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(listen_socket.getsockname()))
            for _ in range(200)
        ]
        for client in clients:
            client.sendall(REQUEST.replace(b"connection: close\r\n", b""))
        task = asyncio.create_task(server.serve(sockets=[listen_socket]))
        await server.started.wait()
        await server.drain(60)
        assert len(answered) == len(clients)
        server.stop()
        await task
        responses = [client.makefile("rb").read() for client in clients]
    assert {response[:13] for response in responses} == {b"HTTP/1.1 200 "}


async def test_connection_is_closed_if_setup_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    monkeypatch.setattr(server_module, "HttpConnection", mock.Mock(side_effect=ValueError("no")))
    async with run_server(unused_app) as (_, port), asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()


async def test_waiting_connection_is_accepted_once_descriptors_are_free() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with run_server(respond) as (_, port):
        with socket.socket() as client, capture_logs() as logs:
            client.settimeout(30)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                client.connect(("127.0.0.1", port))
                await until(lambda: "accepting_paused" in [line["event"] for line in logs])
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            client.sendall(REQUEST)
            response = await asyncio.to_thread(client.recv, 4096)
    assert response.startswith(b"HTTP/1.1 200 OK")
