"""Replicas that a name stands for: those of its addresses come and go, and no request is lost by it."""

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
from tests.integration.gateway.test_tls import server_context, terminated
from tests.support.backend_formats import Vllm
from tests.support.certificates import Authority
from tests.support.changing_pool import (
    BODY,
    Running,
    Steps,
    address,
    left,
    pods,
    whole,
)
from tests.support.changing_pool import gateway as changing
from tests.support.fake_backend import WHOLE, running
from tests.support.gateway_client import COMPLETION, QUICK, stream
from tests.support.kv_event_publisher import publishing
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import until

from argosy.gateway import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts, UpstreamTls
from argosy.gateway.backends import KvEventAddress
from argosy.gateway.pool.dns_discovery import Resolver, resolve_host

LONG_S = 1e9


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.LOOKUP_INTERVAL_S", 0.01)
    monkeypatch.setattr("argosy.gateway.pool.prober.HEALTH_PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr("argosy.policy.resolved_addresses.MISSING_GRACE_S", 0.05)
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", LONG_S)


@dataclass
class Names:
    """A resolver that answers what it is told to."""

    addresses: Collection[str] = ()
    error: OSError | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared: it hangs."""
    asked: int = 0

    def __post_init__(self) -> None:
        self.answers.set()

    async def look_up(self, host: str, family: socket.AddressFamily) -> Collection[str]:
        assert (host, family) == ("replicas.test", socket.AF_UNSPEC)
        self.asked += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        return self.addresses

    async def again(self, times: int = 3) -> None:
        """Wait until it has been asked so many times more."""
        until_then = self.asked + times
        await until(lambda: self.asked >= until_then)


@contextlib.asynccontextmanager
async def gateway(
    look_up: Resolver, *behind: ReplicaConfig, timeouts: Timeouts = QUICK
) -> AsyncIterator[Running]:
    """The model "big" on these."""
    model = ModelConfig(name="big", routing="round-robin", replicas=list(behind))
    config = GatewayConfig(port=0, models=[model], timeouts=timeouts)
    async with changing(config, look_up=look_up) as running:
        yield running


def entry(port: int, host: str = "replicas.test") -> ReplicaConfig:
    return ReplicaConfig(
        url=f"http://{host}:{port}", discover="dns", name="pods", kind="openai", model="rough"
    )


async def test_each_address_is_a_replica() -> None:
    names = Names({address(0), address(1)})
    async with pods(2) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        assert behind.names == {"pods@127.0.0.1", "pods@127.0.0.2"}
        await behind.served(*servers)


async def test_what_each_has_cached_is_followed_where_it_is() -> None:
    names, server = Names({address(0)}), Vllm()
    async with publishing() as publisher, running(server):
        one = ReplicaConfig(
            url=server.url.replace("127.0.0.1", "replicas.test"),
            discover="dns",
            kv_events=KvEventAddress(endpoint=f"tcp://*:{publisher.port}"),
        )
        async with gateway(names.look_up, one):
            await publisher.subscribed()


async def test_requests_wait_for_one_that_takes_the_place_of_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", 0.05)
    names = Names({address(0)})
    patient = Timeouts(failover_timeout_s=1000.0)
    async with (
        pods(2) as servers,
        gateway(names.look_up, entry(servers[0].port), timeouts=patient) as behind,
    ):
        names.addresses = ()
        await until(lambda: not behind.names)
        waiting = asyncio.create_task(behind.ask())
        shown = ""
        while 'queue_depth{model="big"} 1.0' not in shown:
            shown = (await behind.client.get("/metrics")).text
        names.addresses = {address(1)}
        assert await waiting == 200
        assert servers[1].asked


async def test_one_that_comes_is_asked_how_it_is_before_it_gets_requests() -> None:
    names = Names({address(0)})
    async with pods(1) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        names.addresses = {address(0), address(1)}
        await until(lambda: len(behind.names) == 2)
        with capture_logs() as logs:
            for _ in range(10):
                assert await behind.ask() == 200
            shown = (await behind.client.get("/metrics")).text
            assert 'replica="pods@127.0.0.2",state="ready"} 0.0' in shown
            async with rough_server(host=address(1), port=servers[0].port) as second:
                await behind.served(second, servers[0])
        assert not [line for line in logs if line["event"] == "attempt_failed"]


async def test_one_that_goes_ends_what_it_has_and_gets_nothing_more() -> None:
    steps, names = Steps(), Names({address(0), address(1)})
    async with pods(2) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        await behind.served(*servers)
        for one in servers:
            one.script = steps
        running = [
            asyncio.create_task(behind.client.post("/v1/completions", json=BODY | {"stream": True}))
            for _ in range(4)
        ]
        await until(lambda: all(one.most_at_once >= 2 for one in servers))
        going, staying = servers
        names.addresses = {address(1)}
        await until(lambda: behind.names == {"pods@127.0.0.2"})
        assert "127.0.0.1" not in (await behind.client.get("/metrics")).text
        going.asked.clear()
        staying.script = whole
        for _ in range(4):
            assert await behind.ask() == 200
        assert not going.asked
        steps.more.set()
        for answer in await asyncio.gather(*running):
            assert "first" in answer.text
            assert " last" in answer.text
            assert answer.text.endswith("[DONE]\n\n")
        await left(going)
        await behind.served(staying)


async def test_what_runs_on_one_that_goes_and_dies_is_asked_of_another() -> None:
    async def dies(asked: Asked) -> None:
        await names.again(20)
        asked.writer.close()

    names = Names({address(0)})
    async with pods(2) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        servers[0].script, servers[1].script = dies, whole
        asked = asyncio.create_task(behind.ask())
        await until(lambda: servers[0].asked)
        names.addresses = {address(1)}
        assert await asked == 200
        assert behind.names == {"pods@127.0.0.2"}


async def test_no_request_is_lost_however_often_they_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def slowly(asked: Asked) -> None:
        asked.stream()
        for number in range(5):
            await asyncio.sleep(0.002)
            asked.say(f" {number}", "stop" if number == 4 else None)
        asked.end(tokens=5)

    monkeypatch.setattr("argosy.policy.resolved_addresses.MISSING_GRACE_S", 0.0)
    some = [{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}]
    draw, names = random.Random(7), Names({address(0)})
    async with pods(3) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        for one in servers:
            one.script = slowly
        changing = True

        async def asks() -> int:
            count = 0
            while changing:
                answer = await behind.client.post("/v1/completions", json=BODY | {"stream": True})
                assert answer.status_code == 200, answer.text
                assert answer.text.endswith("[DONE]\n\n"), answer.text
                count += 1
            return count

        asking = [asyncio.create_task(asks()) for _ in range(8)]
        for _ in range(60):
            names.addresses = {address(number) for number in draw.choice(some)}
            await names.again(2)
        changing = False
        assert all(await asyncio.gather(*asking))
        names.addresses = {address(2)}
        await until(lambda: behind.names == {"pods@127.0.0.3"})
        await left(*servers[:2])


async def test_addresses_that_are_lacking_now_and_then_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.policy.resolved_addresses.MISSING_GRACE_S", 5.0)
    names = Names({address(0), address(1)})
    async with pods(2) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        there = behind.server.replicas
        for number in range(20):
            names.addresses = {address(number % 2)}
            await names.again(1)
            assert await behind.ask() == 200
        assert all(a is b for a, b in zip(behind.server.replicas, there, strict=True))


@pytest.mark.parametrize("trouble", ["error", "empty", "hangs"])
async def test_a_resolver_that_does_not_say_changes_nothing(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.SLOW_LOOKUP_S", 0.05)
    names = Names({address(0)})
    async with pods(2) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        with capture_logs() as logs:
            if trouble == "error":
                names.error = OSError("the resolver is away")
            elif trouble == "empty":
                names.addresses = ()
            else:
                names.answers.clear()
            await until(lambda: any(line["event"] == "dns_lookup_failed" for line in logs))
            await asyncio.sleep(0.2)  # it would have gone by now
            assert behind.names == {"pods@127.0.0.1"}
            assert await behind.ask() == 200
        assert [line["event"] for line in logs].count("dns_lookup_failed") == 1
        names.error, names.addresses = None, {address(1)}
        names.answers.set()
        await until(lambda: behind.names == {"pods@127.0.0.2"})
        await behind.served(servers[1])


async def test_a_name_that_long_has_no_address_has_none_until_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.policy.resolved_addresses.EMPTY_ANSWER_GRACE_S", 0.05)
    names = Names()
    async with pods(1) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        assert await behind.ask() == 503
        assert (await behind.client.get("/ready")).status_code == 503
        names.addresses = {address(0)}
        await until(lambda: behind.names)
        await behind.served(servers[0])
        names.addresses = ()
        await until(lambda: not behind.names)
        assert await behind.ask() == 503


async def test_a_resolver_that_hangs_keeps_no_gateway_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.gateway.pool.dns_discovery.SLOW_LOOKUP_S", 0.05)
    names = Names({address(0)})
    names.answers.clear()
    async with pods(1) as servers, gateway(names.look_up, entry(servers[0].port)) as behind:
        assert await behind.ask() == 503
        names.answers.set()
        await until(lambda: behind.names)
        await behind.served(servers[0])


async def test_addresses_may_be_of_ipv6() -> None:
    async with (
        rough_server(host="::1") as server,
        gateway(Names({"::1"}).look_up, entry(server.port)) as behind,
    ):
        assert behind.names == {"pods@::1"}
        await behind.served(server)
        shown = await behind.client.get("/replicas/pods@::1/metrics")
        assert "no such path" in shown.text  # says the replica


async def test_the_system_is_asked_for_names() -> None:
    async with (
        pods(1) as servers,
        gateway(resolve_host, entry(servers[0].port, "localhost")) as behind,
    ):
        assert "pods@127.0.0.1" in behind.names
        await behind.served(servers[0])
    assert await resolve_host("localhost", socket.AF_INET) == {"127.0.0.1"}


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_may_have_no_address(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise socket.gaierror(code, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", none)
    assert await resolve_host("replicas.test", socket.AF_UNSPEC) == ()


async def test_a_resolver_may_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(OSError, match="Temporary failure"):
        await resolve_host("replicas.test", socket.AF_UNSPEC)


@pytest.mark.parametrize("name", ["a..test", "ü" * 100])
async def test_what_is_no_name_has_no_address(name: str) -> None:
    with pytest.raises(OSError, match="is not a valid host name"):
        await resolve_host(name, socket.AF_UNSPEC)


async def test_certificates_are_those_of_the_name(tmp_path: Path) -> None:
    authority, double = Authority(tmp_path), Vllm()
    context = server_context(authority.pair("pods", "replicas.test"))
    async with running(double), terminated(double, context) as port:
        tls = UpstreamTls(ca=authority.ca)
        url = f"https://replicas.test:{port}"
        behind = ReplicaConfig(url=url, discover="dns", model="cat", tls=tls)
        async with gateway(Names({"127.0.0.1"}).look_up, behind) as one:
            assert one.names == {f"{url}@127.0.0.1"}
            assert (await stream(one.client, COMPLETION)).text == WHOLE
    assert {asked.headers["host"] for asked in double.asked} == {f"replicas.test:{port}"}
