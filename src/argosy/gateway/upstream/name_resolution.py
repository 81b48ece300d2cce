"""Name resolution with the system's resolver, in a thread per lookup so that a slow name delays no other."""

from __future__ import annotations

import socket
from functools import partial

from argosy.process import run_in_daemon_thread


async def resolve_addresses(
    host: str, family: socket.AddressFamily = socket.AF_UNSPEC
) -> tuple[str, ...]:
    """Resolve `host` to its addresses, in the order in which to try them.

    The event loop's own `getaddrinfo` shares a few threads, which unanswered lookups would block for all names.

    Raises:
        OSError: The name has no address, or the resolver failed.
    """
    look_up = partial(socket.getaddrinfo, host, None, family, socket.SOCK_STREAM)
    try:
        try:
            found = look_up(flags=socket.AI_NUMERICHOST)  # an address needs no lookup
        except socket.gaierror:
            found = await run_in_daemon_thread(look_up)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a valid host name") from error
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
