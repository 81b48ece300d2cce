"""Monitoring files: rules pass promtool's tests, and a real Prometheus returns data for rules and dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from tests.support.gateway_client import run_gateway_server
from tests.support.gateway_processes import open_organisation
from tests.support.replica_servers import MODEL, bundled_model_engine, serve
from tests.support.services import find_program, running_redis

from argosy.deployment import GatewayConfig, LimitsConfig, ModelConfig, QueueConfig, ReplicaConfig
from argosy.gateway import FleetPools, GatewayPoolsClient
from argosy.store import StoreConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
PAGE = Path(__file__).parents[3] / "docs/how-to/alerts.md"
RULES = DEPLOY / "prometheus/rules"
DASHBOARD = json.loads((DEPLOY / "grafana/argosy.json").read_text())
ENGINE_GAUGES = {"argosy_requests_running", "argosy_requests_waiting", "argosy_kv_usage_ratio"}
"""Metrics that the reference page lacks, because an idle engine has none."""
PROMETHEUS_START_S = 60.0


def load_rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard_expressions() -> Iterator[str]:
    """Yield the expressions of all panels, for all values of the variables."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$(model|replica|tenant)", ".*", target["expr"])


def alert_expressions() -> Iterator[str]:
    """Yield the expressions of all alerts, with a comparison that also returns data if it is false."""
    for rule in load_rules("alerts.yml"):
        yield re.sub(r"(==|>=|>) ([0-9.]+)$", r"\1 bool \2", rule["expr"])


def test_rules_pass_their_promtool_tests() -> None:
    promtool = find_program("promtool", "prometheus")
    for command in (
        ("check", "rules", "alerts.yml", "recording.yml"),
        ("test", "rules", "tests.yml"),
        ("check", "config", "--syntax-only", "../prometheus.yml"),
    ):
        done = subprocess.run(
            [promtool, *command], cwd=RULES, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_expressions_name_existing_metrics() -> None:
    page = (PAGE.parents[1] / "reference/metrics.md").read_text()
    known = set(re.findall(r"^\| `(argosy_\w+)`", page, re.MULTILINE)) | ENGINE_GAUGES
    recorded = {rule["record"] for rule in load_rules("recording.yml")}
    rules = [*load_rules("recording.yml"), *load_rules("alerts.yml")]
    for expression in (*(rule["expr"] for rule in rules), *dashboard_expressions()):
        for name in re.findall(r"[a-z_]+:argosy_[\w:]+|argosy_\w+", expression):
            metric = re.sub(r"_bucket$", "", name)
            assert metric in known | recorded, (name, expression)


def test_page_explains_every_alert() -> None:
    explained = set(re.findall(r"`([A-Z]\w+)`", PAGE.read_text()))
    assert {rule["alert"] for rule in load_rules("alerts.yml")} <= explained


@contextlib.asynccontextmanager
async def run_prometheus(
    folder: Path, gateway: str, replica: str, key: str
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run Prometheus with the shipped configuration, for one gateway and replica, at intervals of a second."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES.parent / name) for name in config["rule_files"]]
    (folder / "argosy.key").write_text(key)
    for job in config["scrape_configs"]:
        (static,) = job["static_configs"]
        static["targets"] = [gateway]
        if "labels" in static:
            static["labels"] = {"replica": replica}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = await asyncio.create_subprocess_exec(
        find_program("prometheus", "prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=30) as client:
            async with asyncio.timeout(PROMETHEUS_START_S):
                while not await is_ready(client):
                    assert process.returncode is None, "Prometheus ended at its start"
                    await asyncio.sleep(0.05)
            yield client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def is_ready(client: httpx2.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx2.TransportError:
        return False


async def has_data(client: httpx2.AsyncClient, expression: str) -> bool:
    """Return whether an expression has a value that is a number."""
    response = await client.get("/api/v1/query", params={"query": expression})
    answer = response.json()
    assert answer["status"] == "success", (expression, answer)
    return any(sample["value"][1] != "NaN" for sample in answer["data"]["result"])


@pytest.mark.exhaustive
async def test_every_expression_returns_data_of_a_loaded_fleet(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    async with contextlib.AsyncExitStack() as stack:
        accounts = stack.enter_context(open_organisation(url))
        redis = stack.enter_context(running_redis())
        shop, limited = accounts.project("shop"), accounts.project("limited")
        accounts.price(5)
        accounts.limit(limited, "requests", 1, "hour")
        keys = [accounts.key(shop), accounts.key(limited)]
        viewer = accounts.key(shop, "prometheus", role="viewer", scope="gateway")
        served = await stack.enter_async_context(serve(bundled_model_engine()))
        config = GatewayConfig(
            port=0,
            fleet="demo",
            store=StoreConfig(url=url),
            limits=LimitsConfig(redis=redis.url),
            pools_file=str(tmp_path / "pools.json"),
            queue=QueueConfig(timeout_s=0.1),
        )
        _, gateway = await stack.enter_async_context(run_gateway_server(config))
        replica = ReplicaConfig(name="big-1", url=served.url, model=MODEL)
        gone = ReplicaConfig(name="gone-1", url="http://127.0.0.1:9")
        pools = FleetPools(
            fleet="demo",
            epoch=1,
            version=1,
            models=[
                ModelConfig(name="big", replicas=[replica]),
                ModelConfig(name="gone", replicas=[gone]),
            ],
            desired_replicas={"big": 1},
        )
        (record,) = accounts.store.gateways.list_running()
        await GatewayPoolsClient().publish(record, pools)
        prometheus = await stack.enter_async_context(
            run_prometheus(tmp_path, gateway.base_url.netloc.decode(), "big-1", viewer)
        )
        waiting = [
            *(rule["record"] for rule in load_rules("recording.yml")),
            *alert_expressions(),
            *dashboard_expressions(),
        ]
        async with asyncio.timeout(120):
            while waiting:
                await asyncio.gather(
                    *(send(gateway, "big", key) for key in keys), send(gateway, "gone", keys[0])
                )
                await GatewayPoolsClient().read_status(record)  # as a controller does
                waiting = [one for one in waiting if not await has_data(prometheus, one)]


async def send(gateway: httpx2.AsyncClient, model: str, key: str) -> None:
    body = {"model": model, "prompt": "Hello there", "max_tokens": 4, "stream": True}
    response = await gateway.post(
        "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert response.status_code in ({503} if model == "gone" else {200, 429}), response.text
