"""Replicas discovered by DNS: addresses appear and disappear, and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.test_tls import serve_behind_tls, server_context
from tests.support.backend_formats import Vllm
from tests.support.certificates import Authority
from tests.support.changing_pool import (
    BODY,
    PausedStream,
    RunningGateway,
    fake_pods,
    pod_address,
    wait_until_disconnected,
)
from tests.support.changing_pool import gateway as run_changing_gateway
from tests.support.fake_backend import ANSWER_TEXT, serve_backends
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamRequest,
    fake_upstream,
    respond_with_text,
)
from tests.support.gateway_client import COMPLETION, QUICK_TIMEOUTS, stream
from tests.support.kv_event_publisher import kv_event_publisher
from tests.support.waiting import until

from argosy.deployment import (
    GatewayConfig,
    KvEventAddress,
    ModelConfig,
    ReplicaConfig,
    Timeouts,
    UpstreamTls,
)
from argosy.gateway.pool import Resolver, resolve_host

NEVER_S = 1e9


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.LOOKUP_INTERVAL_S", 0.01)
    monkeypatch.setattr("argosy.policy.health_check.HEALTH_PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.policy.resolved_addresses.MISSING_GRACE_S", 0.05)
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", NEVER_S)


@dataclass
class FakeResolver:
    """A resolver that returns what a test sets."""

    addresses: Collection[str] = ()
    error: OSError | None = None
    responds: asyncio.Event = field(default_factory=asyncio.Event)
    """Lookups hang while it is cleared."""
    lookups: int = 0

    def __post_init__(self) -> None:
        self.responds.set()

    async def look_up(self, host: str, family: socket.AddressFamily) -> Collection[str]:
        assert (host, family) == ("replicas.test", socket.AF_UNSPEC)
        self.lookups += 1
        await self.responds.wait()
        if self.error is not None:
            raise self.error
        return self.addresses

    async def wait_for_lookups(self, times: int = 3) -> None:
        """Wait for this many further lookups."""
        expected_lookups = self.lookups + times
        await until(lambda: self.lookups >= expected_lookups)


@contextlib.asynccontextmanager
async def gateway(
    resolve: Resolver, *replica_configs: ReplicaConfig, timeouts: Timeouts = QUICK_TIMEOUTS
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with the model "big" on these replicas."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(replica_configs))
    config = GatewayConfig(port=0, models=[model], timeouts=timeouts)
    async with run_changing_gateway(config, resolver=resolve) as running:
        yield running


def make_entry(port: int, host: str = "replicas.test") -> ReplicaConfig:
    return ReplicaConfig(
        url=f"http://{host}:{port}", discover="dns", name="pods", kind="openai", model="rough"
    )


@contextlib.asynccontextmanager
async def run_pods(
    count: int, resolver: FakeResolver, timeouts: Timeouts = QUICK_TIMEOUTS
) -> AsyncIterator[tuple[list[FakeUpstream], RunningGateway]]:
    """Run this many pods, and a gateway that discovers them."""
    async with (
        fake_pods(count) as servers,
        gateway(resolver.look_up, make_entry(servers[0].port), timeouts=timeouts) as running,
    ):
        yield servers, running


async def test_each_address_is_replica() -> None:
    resolver = FakeResolver({pod_address(0), pod_address(1)})
    async with run_pods(2, resolver) as (servers, running):
        assert running.replica_names == {"pods@127.0.0.1", "pods@127.0.0.2"}
        await running.wait_until_served_by(*servers)


async def test_kv_events_are_followed_at_each_address() -> None:
    resolver, server = FakeResolver({pod_address(0)}), Vllm()
    async with kv_event_publisher() as publisher, serve_backends(server):
        one = ReplicaConfig(
            url=server.url.replace("127.0.0.1", "replicas.test"),
            discover="dns",
            kv_events=KvEventAddress(endpoint=f"tcp://*:{publisher.port}"),
        )
        async with gateway(resolver.look_up, one):
            await publisher.wait_for_subscriber()


async def test_requests_wait_for_replacement_of_last_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", 0.05)
    resolver = FakeResolver({pod_address(0)})
    timeouts = Timeouts(failover_timeout_s=1000.0)
    async with run_pods(2, resolver, timeouts=timeouts) as (servers, running):
        resolver.addresses = ()
        await until(lambda: not running.replica_names)
        waiting = asyncio.create_task(running.request_status())
        metrics_text = ""
        while 'queue_depth{model="big"} 1.0' not in metrics_text:
            metrics_text = (await running.client.get("/metrics")).text
        resolver.addresses = {pod_address(1)}
        assert await waiting == 200
        assert servers[1].requests


async def test_new_replica_is_probed_before_it_gets_requests() -> None:
    resolver = FakeResolver({pod_address(0)})
    async with run_pods(1, resolver) as (servers, running):
        resolver.addresses = {pod_address(0), pod_address(1)}
        await until(lambda: len(running.replica_names) == 2)
        with capture_logs() as logs:
            for _ in range(10):
                assert await running.request_status() == 200
            metrics_text = (await running.client.get("/metrics")).text
            assert 'replica="pods@127.0.0.2",status="ready"} 0.0' in metrics_text
            async with fake_upstream(host=pod_address(1), port=servers[0].port) as second:
                await running.wait_until_served_by(second, servers[0])
        assert not [entry for entry in logs if entry["event"] == "attempt_failed"]


async def test_removed_replica_finishes_its_requests_and_gets_no_more() -> None:
    paused_stream, resolver = PausedStream(), FakeResolver({pod_address(0), pod_address(1)})
    async with run_pods(2, resolver) as (servers, running):
        await running.wait_until_served_by(*servers)
        for server in servers:
            server.script = paused_stream
        tasks = [
            asyncio.create_task(
                running.client.post("/v1/completions", json=BODY | {"stream": True})
            )
            for _ in range(4)
        ]
        await until(lambda: all(server.max_concurrent >= 2 for server in servers))
        removed, remaining = servers
        resolver.addresses = {pod_address(1)}
        await until(lambda: running.replica_names == {"pods@127.0.0.2"})
        assert "127.0.0.1" not in (await running.client.get("/metrics")).text
        removed.requests.clear()
        remaining.script = respond_with_text
        for _ in range(4):
            assert await running.request_status() == 200
        assert not removed.requests
        paused_stream.resume.set()
        for response in await asyncio.gather(*tasks):
            assert "first" in response.text
            assert " last" in response.text
            assert response.text.endswith("[DONE]\n\n")
        await wait_until_disconnected(removed)
        await running.wait_until_served_by(remaining)


async def test_request_on_failed_removed_replica_is_retried_on_another() -> None:
    async def fail_after_removal(request: UpstreamRequest) -> None:
        await resolver.wait_for_lookups(20)
        request.writer.close()

    resolver = FakeResolver({pod_address(0)})
    async with run_pods(2, resolver) as (servers, running):
        servers[0].script, servers[1].script = fail_after_removal, respond_with_text
        task = asyncio.create_task(running.request_status())
        await until(lambda: servers[0].requests)
        resolver.addresses = {pod_address(1)}
        assert await task == 200
        assert running.replica_names == {"pods@127.0.0.2"}


async def test_no_request_is_lost_while_addresses_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def respond_slowly(request: UpstreamRequest) -> None:
        request.start_stream()
        for number in range(5):
            await asyncio.sleep(0.002)
            request.send_text(f" {number}", "stop" if number == 4 else None)
        request.end_stream(tokens=5)

    monkeypatch.setattr("argosy.policy.resolved_addresses.MISSING_GRACE_S", 0.0)
    address_sets = [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}]
    rng, resolver = random.Random(7), FakeResolver({pod_address(0)})
    async with run_pods(3, resolver) as (servers, running):
        for server in servers:
            server.script = respond_slowly
        is_changing = True

        async def send_requests() -> int:
            count = 0
            while is_changing:
                response = await running.client.post(
                    "/v1/completions", json=BODY | {"stream": True}
                )
                assert response.status_code == 200, response.text
                assert response.text.endswith("[DONE]\n\n"), response.text
                count += 1
            return count

        tasks = [asyncio.create_task(send_requests()) for _ in range(8)]
        for _ in range(25):
            resolver.addresses = {pod_address(number) for number in rng.choice(address_sets)}
            await resolver.wait_for_lookups(2)
        is_changing = False
        assert all(await asyncio.gather(*tasks))
        resolver.addresses = {pod_address(2)}
        await until(lambda: running.replica_names == {"pods@127.0.0.3"})
        await wait_until_disconnected(*servers[:2])


@pytest.mark.parametrize("fault", ["error", "empty", "hangs"])
async def test_failing_resolver_changes_nothing(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.SLOW_LOOKUP_S", 0.05)
    resolver = FakeResolver({pod_address(0)})
    async with run_pods(2, resolver) as (servers, running):
        with capture_logs() as logs:
            if fault == "error":
                resolver.error = OSError("no DNS server responds")
            elif fault == "empty":
                resolver.addresses = ()
            else:
                resolver.responds.clear()
            await until(lambda: any(entry["event"] == "dns_lookup_failed" for entry in logs))
            await asyncio.sleep(0.2)  # an address would have been removed by now
            assert running.replica_names == {"pods@127.0.0.1"}
            assert await running.request_status() == 200
        assert [entry["event"] for entry in logs].count("dns_lookup_failed") == 1
        resolver.error, resolver.addresses = None, {pod_address(1)}
        resolver.responds.set()
        await until(lambda: running.replica_names == {"pods@127.0.0.2"})
        await running.wait_until_served_by(servers[1])


@pytest.mark.parametrize("hangs", [False, True])
async def test_name_without_address_has_no_replicas(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that hangs does not block the start either."""
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.SLOW_LOOKUP_S", 0.05)
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", 0.05)
    resolver = FakeResolver({pod_address(0)} if hangs else ())
    if hangs:
        resolver.responds.clear()
    async with run_pods(1, resolver) as (servers, running):
        assert await running.request_status() == 503
        assert (await running.client.get("/ready")).status_code == 503
        resolver.addresses = {pod_address(0)}
        resolver.responds.set()
        await until(lambda: running.replica_names)
        await running.wait_until_served_by(servers[0])
        resolver.addresses = ()
        await until(lambda: not running.replica_names)
        assert await running.request_status() == 503


async def test_addresses_may_be_ipv6() -> None:
    async with (
        fake_upstream(host="::1") as server,
        gateway(FakeResolver({"::1"}).look_up, make_entry(server.port)) as running,
    ):
        assert running.replica_names == {"pods@::1"}
        await running.wait_until_served_by(server)
        metrics_text = await running.client.get("/replicas/pods@::1/metrics")
        assert "no such path" in metrics_text.text  # the replica's own error


async def test_system_resolver_is_used_by_default() -> None:
    async with (
        fake_pods(1) as servers,
        gateway(resolve_host, make_entry(servers[0].port, "localhost")) as running,
    ):
        assert "pods@127.0.0.1" in running.replica_names
        await running.wait_until_served_by(servers[0])
    assert await resolve_host("localhost", socket.AF_INET) == {"127.0.0.1"}


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_AGAIN])
async def test_unknown_name_has_no_address_and_failure_is_an_error(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_gaierror(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", raise_gaierror)
    if code == socket.EAI_AGAIN:
        with pytest.raises(OSError, match="Temporary failure"):
            await resolve_host("replicas.test", socket.AF_UNSPEC)
    else:
        assert await resolve_host("replicas.test", socket.AF_UNSPEC) == ()


@pytest.mark.parametrize("name", ["a..test", "ü" * 100])
async def test_invalid_name_is_rejected(name: str) -> None:
    with pytest.raises(OSError, match="is not a valid host name"):
        await resolve_host(name, socket.AF_UNSPEC)


async def test_certificate_is_checked_against_name(tmp_path: Path) -> None:
    authority, backend = Authority(tmp_path), Vllm()
    context = server_context(authority.pair("pods", "replicas.test"))
    async with serve_backends(backend), serve_behind_tls(backend, context) as port:
        tls = UpstreamTls(ca=authority.ca)
        url = f"https://replicas.test:{port}"
        running = ReplicaConfig(url=url, discover="dns", model="cat", tls=tls)
        async with gateway(FakeResolver({"127.0.0.1"}).look_up, running) as gateway_harness:
            assert gateway_harness.replica_names == {f"{url}@127.0.0.1"}
            assert (await stream(gateway_harness.client, COMPLETION)).text == ANSWER_TEXT
    assert {request.headers["host"] for request in backend.requests} == {f"replicas.test:{port}"}
