"""Addresses of names, as the system tells them: it may take its time, which keeps nobody waiting but who asked."""

from __future__ import annotations

import socket
from functools import partial

from argosy.process import run_in_daemon_thread


async def resolve_addresses(
    host: str, family: socket.AddressFamily = socket.AF_UNSPEC
) -> tuple[str, ...]:
    """In the order in which they are to be tried. Raises OSError when there is none, or nobody can say.

    An event loop's own way has few threads for all names: those that nobody answers for would keep all others.
    """
    ask = partial(socket.getaddrinfo, host, None, family, socket.SOCK_STREAM)
    try:
        try:
            found = ask(flags=socket.AI_NUMERICHOST)  # what is an address is not looked up
        except socket.gaierror:
            found = await run_in_daemon_thread(ask)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name") from error
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
