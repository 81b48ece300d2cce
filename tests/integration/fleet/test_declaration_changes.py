"""Changes of a declaration while requests arrive: none is lost, and no stream is cut, unless the plan has said so."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.controlled_fleet import FLEET, REPLICA, Fleet
from tests.support.waiting import until

from argosy.deployment import FleetConfig, parse_fleet

TEXT = "one two three"
INTERVAL_S = 0.05


def declare(
    port: int,
    **settings: Any,  # noqa: ANN401 - of the declaration
) -> FleetConfig:
    """Return a fleet with real gateways and scripted replicas."""
    command = [sys.executable, "-I", "-S", str(REPLICA), "{socket}", "chat"]
    pool = {"name": "chat", "model": "chat", "engine": "scripted", "warm_up": False}
    declaration = {
        "fleet": FLEET,
        "port": port,
        "console": {"enabled": False},
        "models": [{"name": "chat", "source": "argosy-mini"}],
        "engines": {"scripted": {"command": command, "kind": "openai"}},
        "pools": [pool | settings.pop("pool", {})],
    }
    return parse_fleet(msgspec.json.encode(declaration | settings))


@dataclass
class Load:
    """Twenty requests a second to all ports in turn, half of them streams, and on new or on kept connections."""

    ports: list[int]
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
            await asyncio.sleep(INTERVAL_S)

    async def _request(self, client: httpx2.AsyncClient, number: int) -> None:
        url = f"http://127.0.0.1:{self.ports[number % len(self.ports)]}/v1/chat/completions"
        is_stream = bool(number & 2)
        body = {
            "model": "chat",
            "messages": [{"role": "user", "content": "?"}],
            "stream": is_stream,
        }
        headers = {"connection": "close"} if number & 4 else {}
        try:
            response = await client.post(url, json=body, headers=headers)
            text = _read_stream(response.text) if is_stream else _read_message(response.content)
            problem = "" if text == TEXT else f"{response.status_code} {response.text[:300]}"
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


async def apply(fleet: Fleet, config: FleetConfig) -> None:
    number = fleet.apply(config).number

    def is_applied() -> bool:
        status = fleet.status
        return status.revision == number and status.is_as_declared

    await until(is_applied, 0.05)


CHANGES: list[dict[str, Any]] = [
    {"queue": {"timeout_s": 20}},
    {"log_level": "debug"},
    {"timeouts": {"connect_timeout_s": 1}},
    {"pool": {"replicas": 2}},
    {"pool": {"options": {"max_seqs": 4}, "max_surge": 2}},
    {"pool": {"environment": {"A": "1"}}},
    {"pool": {"environment": {"A": "2"}, "spares": 1}},
    {"models": [{"name": "chat", "source": "argosy-mini", "aliases": ["other"]}]},
    {"auth": {"allowed_origins": ["https://a.example"]}},
    {"max_connection_age_s": 5, "fast_path": "off"},
    {"body_limit_bytes": 1_000_000, "explain": {"max_requests": 0}},
]


async def test_change_of_gateway_settings_loses_no_request(fleet: Fleet) -> None:
    port = free_ports(1)
    fleet.start_controller("a")
    await apply(fleet, declare(port))
    load = Load([port])
    async with load.run():
        await load.pass_requests(5)
        await apply(fleet, declare(port, queue={"timeout_s": 20}, pool={"replicas": 2}))
        await load.pass_requests(5)
    assert not load.problems
    assert {each.name for each in fleet.status.replicas} > {"gateway-2-0"}


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
async def test_random_changes_lose_no_request(fleet: Fleet, seed: int) -> None:
    random = Random(seed)
    gateways = 1 + seed % 2
    port = free_ports(gateways)
    fleet.start_controller("a")
    await apply(fleet, declare(port, gateways=gateways))
    load = Load([port + number for number in range(gateways)])
    async with load.run():
        for _ in range(6):
            await load.pass_requests(5)
            settings: dict[str, Any] = {"gateways": random.randint(gateways, 2)}
            for change in random.sample(CHANGES, 3):
                settings |= change
            await apply(fleet, declare(port, **settings))
            await load.pass_requests(5)
            assert not load.problems, settings


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
async def test_gateways_move_to_other_addresses(fleet: Fleet) -> None:
    """Addresses that exclude each other, or that another gateway of the fleet has left, are taken in the end."""
    port = free_ports(4)
    fleet.start_controller("a")
    for settings in (
        {"port": port, "gateways": 2},
        {"port": port + 1, "gateways": 2},
        {"port": port, "gateways": 3},
        {"port": port, "gateways": 1, "host": "0.0.0.0"},  # noqa: S104 - the test needs it
        {"port": port, "gateways": 2, "host": "127.0.0.1"},
        {"port": port + 2, "uds": str(fleet.folder / "gateway.sock"), "gateways": 1},
        {
            "port": port,
            "gateways": 1,
            "uds": str(fleet.folder / "gateway.sock"),
            "log_level": "debug",
        },
        {"port": port, "gateways": 1},
    ):
        config = declare(**settings, auth={"mode": "disabled"})
        await apply(fleet, config)
        async with httpx2.AsyncClient(trust_env=False) as client:
            for ordinal in range(config.gateways if config.uds is None else 0):
                url = f"http://127.0.0.1:{config.port + ordinal}/health"
                assert (await client.get(url)).status_code == 200, settings
