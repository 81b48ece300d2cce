"""Replicas are killed, stopped or drained during requests. Clients still get exact responses."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import openai
import pytest
import pytest_asyncio
from tests.support.api_streams import read_api_stream, stream_requests
from tests.support.gateway_client import serve_gateway
from tests.support.gateway_processes import open_organisation, open_sdk_client
from tests.support.replica_process import MODEL, ReplicaProcess
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, Timeouts
from argosy.gateway import GatewayServer
from argosy.store import StoreConfig

STREAMS = 6
MAX_WAITING = 6
"""Limit on requests during an outage, so that the returning replica can serve all of them."""
pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

StreamOutput = tuple[dict[int, str], dict[int, str], int]
"""Text and finish reason by choice, and the number of output tokens."""


@dataclass
class ReplicaFleet:
    """Replica processes behind a gateway."""

    replicas: list[ReplicaProcess]
    gateway: GatewayServer
    client: openai.AsyncOpenAI
    expected: list[StreamOutput | str] = field(default_factory=list)

    def busiest_replica(self) -> ReplicaProcess:
        """Return the replica with the most requests in flight."""
        loads = self.gateway.replicas
        busiest = max(loads, key=lambda replica: replica.load.in_flight)
        return next(r for r in self.replicas if busiest.name.endswith(str(r.socket)))

    def num_in_flight(self) -> int:
        """Return the number of requests on the replicas."""
        return sum(replica.load.in_flight for replica in self.gateway.replicas)


@contextlib.asynccontextmanager
async def run_gateway(
    replicas: list[ReplicaProcess], store: StoreConfig | None = None
) -> AsyncIterator[ReplicaFleet]:
    """Run a gateway in front of running replicas, with a store if one is given."""
    configs = [ReplicaConfig(url=f"unix:{replica.socket}") for replica in replicas]
    config = GatewayConfig(
        port=0,
        models=[ModelConfig(name=MODEL, routing="round-robin", replicas=configs)],
        timeouts=Timeouts(stream_idle_timeout_s=2.0, first_token_timeout_s=8.0),
        store=store,
    )
    async with (
        serve_gateway(config) as (gateway, url),
        open_sdk_client(url, "unused") as client,
    ):
        yield ReplicaFleet(replicas, gateway, client)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReplicaFleet]:
    """Run two replicas behind a gateway, and record the undisturbed streams and responses."""
    folder = tmp_path_factory.mktemp("fleet")
    replicas = [ReplicaProcess(folder / f"{number}.sock") for number in range(2)]
    try:
        for replica in replicas:
            await replica.start()
        await asyncio.gather(*(replica.wait_ready() for replica in replicas))
        async with run_gateway(replicas) as running:
            running.expected = await send_all(running)
            yield running
    finally:
        for replica in replicas:
            await replica.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(module_fleet: ReplicaFleet) -> AsyncIterator[ReplicaFleet]:
    """Return the fleet. Replicas that the test sent a signal start again, also after a failure."""
    yield module_fleet
    for replica in module_fleet.replicas:
        if replica.was_signalled:
            await replica.restart()


async def read_stream(
    fleet: ReplicaFleet,
    number: int,
    chunk_count: asyncio.Semaphore | None = None,
    *,
    logprobs: bool = False,
) -> StreamOutput:
    """Read a seeded stream. Every third stream has two choices. `chunk_count` is released per chunk.

    With `logprobs` the texts at negative keys are the tokens' log-probabilities, which differ in another arithmetic.
    """
    stream = await fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me a story about {number}."}],
        temperature=0.9 if number % 2 else 0.0,
        seed=number,
        n=1 + (number % 3 == 1),
        max_tokens=100,
        logprobs=logprobs,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": number % 3 > 0},
    )
    texts: dict[int, str] = {}
    finish_reasons: dict[int, str] = {}
    tokens, ids = 0, set()
    async for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for each in (choice.logprobs and choice.logprobs.content) or ():
                texts[~choice.index] = texts.get(~choice.index, "") + f" {each.logprob}"
            if choice.finish_reason:
                assert choice.index not in finish_reasons
                finish_reasons[choice.index] = choice.finish_reason
        if chunk.usage:
            tokens = chunk.usage.completion_tokens
        if chunk_count is not None:
            chunk_count.release()
    assert len(ids) == 1
    return texts, finish_reasons, tokens


async def get_response(fleet: ReplicaFleet, number: int) -> str:
    """Return a seeded non-streamed response as JSON, without ids, times and cache counts."""
    response = await fleet.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"Tell me a story about {number}."}],
        temperature=0.9,
        seed=number,
        n=1 + number % 2,
        max_tokens=100,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    assert response.usage is not None
    response.usage.prompt_tokens_details = None
    return response.model_copy(update={"id": "", "created": 0}).to_json()


async def send_all(
    fleet: ReplicaFleet, chunk_count: asyncio.Semaphore | None = None
) -> list[StreamOutput | str]:
    """Send all streams and half as many non-streamed requests at once, and return what they receive."""
    streams = (read_stream(fleet, number, chunk_count) for number in range(STREAMS))
    responses = (get_response(fleet, number) for number in range(STREAMS // 2))
    return await asyncio.gather(*streams, *responses)


@pytest.mark.parametrize(
    ("fault", "after_chunks"),
    [
        (signal.SIGSTOP, 100),
        # The streams of all APIs below, and those of test_local_fleet_faults.py, survive it on every change.
        pytest.param(signal.SIGKILL, 10, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGTERM, 100, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, 300, marks=pytest.mark.soak),
    ],
)
async def test_streams_and_responses_survive_signal_to_replica(
    fleet: ReplicaFleet, fault: signal.Signals, after_chunks: int
) -> None:
    chunk_count = asyncio.Semaphore(0)
    outputs = asyncio.create_task(send_all(fleet, chunk_count))
    for _ in range(after_chunks):
        await chunk_count.acquire()
    fleet.busiest_replica().send_signal(fault)
    assert await outputs == fleet.expected


async def test_streams_of_all_apis_survive_killed_replica(
    fleet: ReplicaFleet, tmp_path: Path
) -> None:
    prompt, store = "Tell me a story about a fox.", f"sqlite:///{tmp_path}/store.db"
    victim = fleet.replicas[0]
    async with contextlib.AsyncExitStack() as stack:
        accounts = stack.enter_context(open_organisation(store))
        gateway = await stack.enter_async_context(
            run_gateway(fleet.replicas, StoreConfig(url=store))
        )
        url = str(gateway.client.base_url).removesuffix("/v1/")
        client = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=120))
        requests = stream_requests(MODEL, prompt, "undisturbed").values()
        expected = await asyncio.gather(*(read_api_stream(client, *each) for each in requests))
        running, started = [], []
        for path, body in stream_requests(MODEL, prompt, "disturbed").values():
            for _ in fleet.replicas:  # which take turns
                started.append(asyncio.Event())
                reading = read_api_stream(client, path, body, started[-1].set)
                running.append(asyncio.create_task(reading))
                await until(lambda: gateway.num_in_flight() >= len(running))
        await asyncio.gather(*(event.wait() for event in started))
        victim.send_signal(signal.SIGKILL)
        streams = await asyncio.gather(*running)
        for index, stream in enumerate(expected):
            pair = streams[2 * index : 2 * index + 2]
            assert pair == [stream, stream]
            traces = [(await client.get(f"/admin/requests/{s.request}")).json() for s in pair]
            assert sum(len(trace["attempts"]) > 1 for trace in traces) == 1
        names = sorted(stream.request for stream in [*expected, *streams])
        rows = await accounts.wait_for_rows(len(names))
        assert sorted(row.request for row in rows) == names
        outcome = "completed", rows[0].input_tokens, rows[0].output_tokens
        assert {(row.status, row.input_tokens, row.output_tokens) for row in rows} == {outcome}


@pytest.mark.exhaustive  # test_other_model.py has the gateway's part with scripted engines
async def test_streams_resume_only_with_their_arithmetic(
    fleet: ReplicaFleet, tmp_path: Path
) -> None:
    """A killed replica's streams wait for its restart, instead of continuing on a quantized replica."""
    quantized, victim = (
        ReplicaProcess(tmp_path / "int4.sock", ("--quantize", "int4")),
        fleet.replicas[0],
    )
    await quantized.start()
    try:
        await quantized.wait_ready()
        undisturbed = []
        for replica in (victim, quantized):
            async with run_gateway([replica]) as alone:
                streams = (read_stream(alone, n, logprobs=True) for n in range(STREAMS))
                undisturbed.append(await asyncio.gather(*streams))
        assert all(map(operator.ne, *undisturbed))
        async with run_gateway([victim, quantized]) as mixed:
            chunk_count = asyncio.Semaphore(0)
            running = [
                asyncio.create_task(read_stream(mixed, n, chunk_count, logprobs=True))
                for n in range(STREAMS)
            ]
            for _ in range(20 * STREAMS):
                await chunk_count.acquire()
            await victim.restart()
            outputs = await asyncio.gather(*running)
            assert all(map(operator.contains, zip(*undisturbed, strict=True), outputs))
    finally:
        await quantized.kill()


async def send_until_recovery(fleet: ReplicaFleet) -> int:
    """Send requests until the only replica has failed and recovered. Return how many began during the outage."""
    (replica,) = fleet.gateway.replicas
    requests, during_outage = [asyncio.create_task(read_stream(fleet, 0))], 0
    while not during_outage or replica.health.is_down:
        await asyncio.sleep(0.1)
        if during_outage < MAX_WAITING:
            requests.append(asyncio.create_task(read_stream(fleet, 3 * len(requests))))
            during_outage += replica.health.is_down
    await asyncio.gather(*requests)
    return during_outage


async def test_requests_wait_for_only_replica_to_recover(fleet: ReplicaFleet) -> None:
    replica = fleet.replicas[0]
    async with run_gateway([replica]) as running:
        sending = asyncio.create_task(send_until_recovery(running))
        replica.kill_core()
        assert await sending
        sending = asyncio.create_task(send_until_recovery(running))
        await replica.kill()
        await replica.start()
        assert await sending
