"""A replica that is killed, stopped or sent away in the middle of streams: the clients get what they would have got."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import psutil
import pytest

from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig, Timeouts

STREAMS = 6
WAITING = 20
"""Most who ask while a replica is away: all are answered by one that is just back."""
MODEL = "argosy-mini"
pytestmark = pytest.mark.timeout(480)

Answer = tuple[dict[int, str], dict[int, str], int]
"""Text and finish reason by choice, and output tokens."""


@dataclass
class ReplicaProcess:
    """`argosy replica` with the bundled model, on a Unix socket."""

    socket: Path
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "replica", "--uds", str(self.socket)),
            *("--threads", "1", "--kv-memory", "64MiB", "--drain-deadline", "0"),
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def ready(self) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=str(self.socket))
        async with httpx2.AsyncClient(transport=transport, base_url="http://replica") as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get("/ready")).status_code == 200:
                        return
                await asyncio.sleep(0.05)

    def kill_core(self) -> None:
        """Its engine dies; its server lives."""
        assert self.process is not None
        for core in psutil.Process(self.process.pid).children():
            core.kill()

    async def end(self) -> None:
        """Whatever is left of it, the core included."""
        assert self.process is not None
        if self.process.returncode is None:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess):  # it may just have left by itself
                own = psutil.Process(self.process.pid)
                family = [*own.children(recursive=True), own]
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        await self.process.wait()


@dataclass
class Fleet:
    """Replicas behind a gateway."""

    replicas: list[ReplicaProcess]
    gateway: GatewayServer
    client: openai.AsyncOpenAI
    expected: list[Answer] = field(default_factory=list)

    def busiest(self) -> ReplicaProcess:
        """The one that serves most streams."""
        loads = self.gateway.replicas
        busiest = max(loads, key=lambda replica: replica.load.in_flight)
        return next(r for r in self.replicas if busiest.name.endswith(str(r.socket)))


@contextlib.asynccontextmanager
async def fleet(folder: Path, count: int = 2) -> AsyncIterator[Fleet]:
    replicas = [ReplicaProcess(folder / f"{number}.sock") for number in range(count)]
    for replica in replicas:
        await replica.start()
    running = None
    try:
        await asyncio.gather(*(replica.ready() for replica in replicas))
        config = GatewayConfig(
            port=0,
            models=[
                ModelConfig(
                    name=MODEL,
                    routing="round-robin",
                    replicas=[ReplicaConfig(url=f"unix:{r.socket}") for r in replicas],
                )
            ],
            timeouts=Timeouts(stream_idle_timeout_s=4.0, first_token_timeout_s=20.0),
        )
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        gateway = GatewayServer(config, url.set_result)
        running = asyncio.create_task(gateway.run())
        base = f"{await url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="unused", max_retries=0) as client:
            yield Fleet(replicas, gateway, client)
        gateway.stop()
        await running
    finally:
        if running is not None:
            running.cancel()
        for replica in replicas:
            await replica.end()


async def answer(fleet: Fleet, number: int, told: asyncio.Semaphore | None = None) -> Answer:
    """One seeded stream, some of two choices; `told` counts its chunks."""
    stream = await fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me a story about {number}."}],
        temperature=0.9 if number % 2 else 0.0,
        seed=number,
        n=1 + (number % 3 == 1),
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": number % 3 > 0},
    )
    texts: dict[int, str] = {}
    finishes: dict[int, str] = {}
    tokens, ids = 0, set()
    async for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in finishes
                finishes[choice.index] = choice.finish_reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if told is not None:
            told.release()
    assert len(ids) == 1
    return texts, finishes, tokens


async def disturbed(fleet: Fleet, what: signal.Signals, after_chunks: int) -> None:
    """Run all streams, do `what` to the busiest replica after so many chunks, and compare."""
    told = asyncio.Semaphore(0)
    streams = [asyncio.create_task(answer(fleet, n, told)) for n in range(STREAMS)]
    for _ in range(after_chunks):
        await told.acquire()
    victim = fleet.busiest()
    assert victim.process is not None
    victim.process.send_signal(what)
    assert await asyncio.gather(*streams) == fleet.expected
    await victim.end()
    await victim.start()
    await victim.ready()


async def whole(fleet: Fleet, number: int, name: str) -> str:
    """One seeded answer that is sent whole, as JSON, without what differs from answer to answer."""
    answer = await fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me a story about {number}."}],
        temperature=0.9,
        seed=number,
        n=1 + number % 2,
        max_tokens=200,
        logprobs=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-request-id": name},
    )
    assert answer.usage is not None
    answer.usage.prompt_tokens_details = None
    return answer.model_copy(update={"id": "", "created": 0}).to_json()


async def begun(fleet: Fleet, names: list[str]) -> None:
    """Wait until the first token of one of these requests has come to the gateway."""
    url = str(fleet.client.base_url).removesuffix("v1/")
    async with httpx2.AsyncClient(base_url=url) as client:
        while True:
            for name in names:
                told = await client.get(f"/admin/requests/{name}")
                if told.status_code == 200 and told.json()["ms"]["first_token"] is not None:
                    return
            await asyncio.sleep(0.005)


async def whole_answers_disturbed(fleet: Fleet) -> None:
    """Kill the busiest replica once whole answers are being made, and compare."""
    expected = await asyncio.gather(*(whole(fleet, n, f"calm-{n}") for n in range(STREAMS)))
    names = [f"disturbed-{n}" for n in range(STREAMS)]
    answers = [asyncio.create_task(whole(fleet, n, name)) for n, name in enumerate(names)]
    await begun(fleet, names)
    victim = fleet.busiest()
    assert victim.process is not None
    victim.process.send_signal(signal.SIGKILL)
    assert await asyncio.gather(*answers) == expected
    await victim.end()


async def test_answers_survive_their_replica(tmp_path: Path) -> None:
    async with fleet(tmp_path) as running:
        running.expected = list(await asyncio.gather(*(answer(running, n) for n in range(STREAMS))))
        assert sum(tokens for _, _, tokens in running.expected) > 100 * STREAMS
        await disturbed(running, signal.SIGKILL, 10)
        await disturbed(running, signal.SIGKILL, 300)
        await disturbed(running, signal.SIGTERM, 100)
        await disturbed(running, signal.SIGSTOP, 100)
        await whole_answers_disturbed(running)


async def asked_until_back(fleet: Fleet) -> int:
    """Ask again and again until the only replica, which is to go, is back; how many were answered while it was away."""
    (behind,) = fleet.gateway.replicas
    asked, away = [asyncio.create_task(answer(fleet, 0))], 0
    while not away or behind.outage.is_down:
        await asyncio.sleep(0.1)
        if away < WAITING:
            asked.append(asyncio.create_task(answer(fleet, 3 * len(asked))))
            away += behind.outage.is_down
    await asyncio.gather(*asked)
    return away


async def test_who_asks_while_the_only_replica_is_away_waits_for_it(tmp_path: Path) -> None:
    async with fleet(tmp_path, 1) as running:
        (replica,) = running.replicas
        asking = asyncio.create_task(asked_until_back(running))
        replica.kill_core()
        assert await asking
        asking = asyncio.create_task(asked_until_back(running))
        await replica.end()
        await replica.start()
        assert await asking
