"""Load of a gateway at a steady rate, which finds every request that failed or was cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import httpx2
import msgspec

from tests.support.waiting import until


@dataclass
class Load:
    """Requests at a steady rate to all ports in turn, half of them streams, and on new or on kept connections."""

    ports: list[int]
    model: str = "chat"
    text: str | None = "one two three"
    """Text of every answer; None for any that is complete."""
    interval_s: float = 0.05
    options: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the requests."""
    sent: int = 0
    ended: int = 0
    problems: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with (
            httpx2.AsyncClient(timeout=60, trust_env=False) as client,
            asyncio.TaskGroup() as group,
        ):
            sender = group.create_task(self._send(client, group))
            try:
                yield
            finally:
                sender.cancel()

    async def _send(self, client: httpx2.AsyncClient, group: asyncio.TaskGroup) -> None:
        for number in count():
            self.sent += 1
            group.create_task(self._request(client, number))
            await asyncio.sleep(self.interval_s)

    async def _request(self, client: httpx2.AsyncClient, number: int) -> None:
        url = f"http://127.0.0.1:{self.ports[number % len(self.ports)]}/v1/chat/completions"
        is_stream = bool(number & 2)
        body: dict[str, object] = {
            "model": self.model,
            "messages": [{"role": "user", "content": "?"}],
            "stream": is_stream,
        } | dict(self.options)
        headers = {"connection": "close"} if number & 4 else {}
        try:
            response = await client.post(url, json=body, headers=headers)
            text = _read_stream(response.text) if is_stream else _read_message(response.content)
            is_right = bool(text) if self.text is None else text == self.text
            problem = "" if is_right else f"{response.status_code} {response.text[:300]}"
        except httpx2.HTTPError as error:
            problem = repr(error)
        self.ended += 1
        if problem:
            self.problems.append(f"{number} at {url} stream={is_stream}: {problem}")

    async def pass_requests(self, num: int) -> None:
        """Wait until `num` further requests have ended."""
        target = self.ended + num
        await until(lambda: self.ended >= target)


def _read_message(content: bytes) -> str:
    body = msgspec.json.decode(content)
    return str(body["choices"][0]["message"]["content"]) if "choices" in body else ""


def _read_stream(text: str) -> str:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    if not events or events[-1] != "[DONE]":
        return ""
    chunks = [msgspec.json.decode(each) for each in events[:-1]]
    deltas = (each["choices"][0]["delta"] for each in chunks if each.get("choices"))
    return "".join(delta.get("content") or "" for delta in deltas)


def free_ports(num: int) -> int:
    """Return the first of some free consecutive ports."""
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + num):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return int(first)
