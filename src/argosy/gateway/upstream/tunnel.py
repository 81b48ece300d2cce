"""Tunnel through an HTTP proxy to a server with TLS (CONNECT, RFC 9110, 9.3.6)."""

from __future__ import annotations

import asyncio
import socket

from argosy.gateway.upstream.connection import UpstreamError
from argosy.protocol import Endpoint
from argosy.proxies import Proxy

MAX_HEAD_BYTES = 16 * 1024
"""Maximum size of the head of a proxy's response. The caller bounds its time."""
_HEAD_END = b"\r\n\r\n"


async def open_tunnel(connected: socket.socket, proxy: Proxy, server: Endpoint) -> None:
    """Ask a proxy to forward a connection to a server. The socket then belongs to the server.

    Raises:
        UpstreamError: The proxy refuses, or sends what is no response. The message names it.
        OSError: The connection failed.
    """
    loop = asyncio.get_running_loop()
    host = f"[{server.host}]" if ":" in server.host else server.host
    authority = f"{host}:{server.port}".encode()
    credentials = b""
    if proxy.authorization:
        credentials = b"proxy-authorization: %b\r\n" % proxy.authorization
    request = b"CONNECT %b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (authority, authority, credentials)
    await loop.sock_sendall(connected, request)
    head = b""
    while _HEAD_END not in head:
        received = await loop.sock_recv(connected, MAX_HEAD_BYTES)
        head += received
        if not received or len(head) > MAX_HEAD_BYTES:
            raise _refuse(proxy, "sent no complete response")
    version, _, status = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    if not version.startswith("HTTP/1."):
        raise _refuse(proxy, "does not speak HTTP")
    if status.startswith("407"):
        raise _refuse(proxy, "requires other credentials (407). Write them into its URL")
    if not status.startswith("2"):
        raise _refuse(proxy, f"does not connect to {authority.decode()} (status {status[:100]})")
    if not head.endswith(_HEAD_END):  # the server waits for the client's TLS handshake
        raise _refuse(proxy, "sent more than its response")


def _refuse(proxy: Proxy, problem: str) -> UpstreamError:
    return UpstreamError(f"no connection (proxy {proxy.name} {problem})", before_response=True)
