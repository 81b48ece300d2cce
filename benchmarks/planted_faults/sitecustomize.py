"""Plants a fault in a replica, named by the environment variable ARGOSY_PLANTED_FAULT.

Python imports this module at its start if the folder is in PYTHONPATH. The replicas of a pool with these two variables
are another version of the same weights. Only requests for text are affected, not health checks.

* slow: the first token is half a second late.
* erring: after twenty requests, so that checks pass, three of ten are answered with 500.
* failing=PATH: every request is answered with 500 while a file of that path exists.
* crashing: the process kills itself at its thirtieth request.
* wrong: answers in one piece have another text.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

FAULT = os.environ.get("ARGOSY_PLANTED_FAULT", "")
PATHS = ("/v1/chat/completions", "/v1/completions")
DELAY_S = 0.5
CRASHING_REQUEST = 30
NUM_CHECKS = 20
"""Requests of an erring replica that succeed, so that it passes its warm-up and the pinned prompts."""
ERRING_REQUESTS = 3
"""Number of errors in ten requests."""


def plant() -> None:
    """Replace methods of the server's exchange."""
    from argosy.http_server import HttpExchange
    from argosy.protocol import ApiError

    numbers = itertools.count(1)
    read_body: Callable[[HttpExchange], Awaitable[bytes]] = HttpExchange.read_body
    send_response: Callable[..., Awaitable[None]] = HttpExchange.send_response

    async def faulty_read_body(self: HttpExchange) -> bytes:
        body = await read_body(self)
        if self.path in PATHS:
            number = next(numbers)
            fails = FAULT.startswith("failing=") and Path(FAULT.partition("=")[2]).exists()  # noqa: ASYNC240 - of the benchmark
            if fails:
                raise ApiError(500, "planted", "A planted error.")
            if FAULT == "slow":
                await asyncio.sleep(DELAY_S)
            elif FAULT == "erring" and number > NUM_CHECKS and number % 10 < ERRING_REQUESTS:
                raise ApiError(500, "planted", "A planted error.")
            elif FAULT == "crashing" and number >= CRASHING_REQUEST:
                os.kill(os.getpid(), signal.SIGKILL)
        return body

    async def faulty_send_response(
        self: HttpExchange, status: int, body: bytes, *arguments: bytes
    ) -> None:
        if self.path in PATHS and status == 200 and FAULT == "wrong":
            response = json.loads(body)
            for choice in response["choices"]:
                holder = choice if "text" in choice else choice["message"]
                name = "text" if "text" in choice else "content"
                holder[name] = (holder[name] or "")[::-1]
            body = json.dumps(response).encode()
        await send_response(self, status, body, *arguments)

    HttpExchange.read_body = faulty_read_body  # type: ignore[method-assign]
    HttpExchange.send_response = faulty_send_response  # type: ignore[method-assign,assignment]


if FAULT and "replica" in sys.orig_argv:
    plant()
