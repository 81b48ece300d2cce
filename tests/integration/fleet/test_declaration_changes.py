"""Changes of a declaration while requests arrive: none is lost, and no stream is cut, unless the plan has said so."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.controlled_fleet import FLEET, REPLICA, Fleet
from tests.support.steady_load import Load, free_ports
from tests.support.waiting import until

from argosy.deployment import FleetConfig, parse_fleet
from argosy.version import VERSION


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


async def apply(fleet: Fleet, config: FleetConfig, renewed: Sequence[str] = ()) -> None:
    number = fleet.apply(config, renewed).number

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
    {"limits": {"redis": "redis://127.0.0.1:1"}},  # nothing listens, and no key has a limit
    {"pool": {"min_replicas": 1, "max_replicas": 3, "autoscaling": {}}},
]


async def test_change_of_gateway_settings_loses_no_request(fleet: Fleet) -> None:
    port = free_ports(1)
    fleet.start_controller("a")
    await apply(fleet, declare(port))
    load = Load([port])
    async with load.run():
        await load.pass_requests(5)
        changed = declare(port, queue={"timeout_s": 20}, pool={"replicas": 2})
        await apply(fleet, changed, ["chat"])  # as if its replicas ran another version of Argosy
        await load.pass_requests(5)
    assert not load.problems
    replicas = {each.name: each.version for each in fleet.status.replicas}
    assert replicas == {"gateway-2-0": VERSION, "chat-2-0": "", "chat-2-1": ""}
    drained = {each.replica: each.number for each in fleet.events("replica_drain")}
    started = {each.replica: each.number for each in fleet.events("replica_start")}
    assert drained["gateway-1-0"] < started["chat-2-0"], "gateways are replaced first"


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
async def test_random_changes_lose_no_request(fleet: Fleet, seed: int) -> None:
    random = Random(seed)
    gateways = 1 + seed % 2
    port = free_ports(gateways)
    fleet.start_controller("a")
    store = {"url": fleet.url}
    await apply(fleet, declare(port, store=store, gateways=gateways))
    load = Load([port + number for number in range(gateways)])
    async with load.run():
        for _ in range(6):
            await load.pass_requests(5)
            settings: dict[str, Any] = {"gateways": random.randint(gateways, 2)}
            for change in random.sample(CHANGES, 3):
                settings |= change
            await apply(fleet, declare(port, store=store, **settings))
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
