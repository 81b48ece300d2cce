"""The vLLM server as a replica, if its CPU build is installed: detection, load, resume after every fault."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import httpx2
import pytest
from tests.engine.test_quantize import quantize, write_text
from tests.support.cutting_proxy import StreamCutter, cutting_proxy
from tests.support.gateway_client import (
    CHAT,
    COMPLETION,
    StreamResult,
    chunk_text,
    gateway,
    read_stream,
)
from tests.support.vllm_server import CONTEXT, PEER, PYTHON, VllmServer, run_vllm_servers
from tests.support.waiting import until

from argosy import LLM, SamplingParams
from argosy.deployment import ReplicaConfig, Timeouts
from argosy.engine import EngineConfig
from argosy.gateway import GatewayServer
from argosy.model_store import RecipeName
from argosy.models import BUNDLED_MODEL

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Tell me a story about a cat."}]},
    COMPLETION: {"prompt": "Once upon a time"},
}
BUSY = Timeouts(first_token_timeout_s=20.0, stream_idle_timeout_s=1.5, failover_timeout_s=5.0)
PATIENT = Timeouts(first_token_timeout_s=60.0, stream_idle_timeout_s=20.0, failover_timeout_s=60.0)
"""No live server counts as stalled, even on a busy machine."""
GREEDY = {"temperature": 0, "max_tokens": 40, "stream_options": {"include_usage": True}}

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason=f"there is no vLLM at {PEER}: set ARGOSY_VLLM"),
    pytest.mark.timeout(400),  # it takes a minute to start
]
paths = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@pytest.fixture(scope="module")
def servers() -> Iterator[list[VllmServer]]:
    with TemporaryDirectory() as folder:  # the path of pytest's folder may be too long for a socket
        both = [VllmServer(Path(folder) / f"{number}.sock") for number in range(2)]
        with run_vllm_servers(*both):
            yield both


@contextlib.asynccontextmanager
async def cuttable_gateway(
    servers: list[VllmServer], timeouts: Timeouts = BUSY
) -> AsyncIterator[tuple[GatewayServer, httpx2.AsyncClient, StreamCutter]]:
    """Run a gateway whose connections to the servers go through one `StreamCutter`."""
    async with contextlib.AsyncExitStack() as stack:
        cutter = StreamCutter()
        urls = [
            await stack.enter_async_context(cutting_proxy(each.socket, cutter)) for each in servers
        ]
        replicas = [ReplicaConfig(url=url, model="mini") for url in urls]
        cuttable_gateway = gateway(*replicas, timeouts=timeouts, client_timeout_s=None)
        yield *await stack.enter_async_context(cuttable_gateway), cutter


async def send(
    client: httpx2.AsyncClient,
    path: str,
    extra: dict[str, object],
    fault: Callable[[], object] | None = None,
) -> StreamResult:
    """Read a stream, with a fault after its eighth chunk."""
    body = {"model": "big", "stream": True} | GREEDY | BODIES[path] | extra
    return await read_stream(client, path, body, fault)


def assert_same_stream(
    received: StreamResult, undisturbed: StreamResult, extra: dict[str, object]
) -> None:
    """Check that the client received one response, equal to the undisturbed one."""
    assert (received.text, received.finish_reasons) == (
        undisturbed.text,
        undisturbed.finish_reasons,
    )
    ((prompt, tokens),), ((expected_prompt, expected),) = (
        received.token_counts,
        undisturbed.token_counts,
    )
    past = 3 if "stop" in extra else 0  # tokens in the event that completes a stop string
    assert prompt == expected_prompt
    assert 0 <= tokens - expected <= past
    assert (
        received.done_count,
        received.errors,
        len(received.stream_ids),
        received.role_chunks,
    ) == (
        1,
        [],
        1,
        undisturbed.role_chunks,
    )


async def test_kind_context_and_load_are_detected(servers: list[VllmServer]) -> None:
    async with cuttable_gateway(servers) as (running, _, _):
        for replica in running.replicas:
            assert (replica.kind, replica.max_model_len) == ("vllm", CONTEXT)
            assert (replica.load.running, replica.load.waiting, replica.load.kv_usage_ratio) == (
                0,
                0,
                0.0,
            )


@paths
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stop": ["packed a bottle", "d old tree"]},
        {"stop": ["never"], "min_tokens": 20},
        {"repetition_penalty": 1.3, "ignore_eos": True},
        {"return_token_ids": True, "cache_salt": "a"},
        {"max_tokens": None},
    ],
    ids=lambda extra: "-".join(extra) or "plain",
)
async def test_greedy_stream_resumes_after_any_cut(
    servers: list[VllmServer], path: str, extra: dict[str, object]
) -> None:
    async with cuttable_gateway(servers) as (_, client, cutter):
        undisturbed = await send(client, path, extra)
        assert (undisturbed.done_count, len(undisturbed.finish_reasons)) == (1, 1)
        for events in (0, 1, 2, 7, 13):
            cutter.events_left = events
            assert_same_stream(await send(client, path, extra), undisturbed, extra)
            assert cutter.events_left is None


@paths
async def test_cut_within_character_never_leaks_prompt(
    servers: list[VllmServer], path: str
) -> None:
    split_character_ids = [169, 240, 226, 357]  # of "é", a space, " said"
    messages = {
        "messages": [{"role": "system", "content": "Zebra"}, {"role": "user", "content": "Hi"}]
    }
    prompt = messages if path == CHAT else {"prompt": "Zebra"}
    async with cuttable_gateway(servers) as (_, client, cutter):
        for cut in range(3, 15):
            cutter.events_left = cut
            extra = prompt | {
                "temperature": 1.0,
                "seed": cut,
                "allowed_token_ids": split_character_ids,
            }
            received = await send(client, path, extra)
            assert cutter.events_left is None
            assert "Zebra" not in received.text
            assert (received.done_count, received.errors, received.token_counts[0][1]) == (
                1,
                [],
                GREEDY["max_tokens"],
            )


@paths
async def test_resumed_seeded_stream_is_marked_in_fingerprint(
    servers: list[VllmServer], path: str
) -> None:
    async with cuttable_gateway(servers) as (_, client, cutter):
        extra: dict[str, object] = {"temperature": 0.9, "seed": 7}
        undisturbed = await send(client, path, extra)
        assert (await send(client, path, extra)).text == undisturbed.text
        cutter.events_left = 9
        received = await send(client, path, extra)
        marks = [chunk.get("system_fingerprint") for chunk in received.chunks]
        first = marks.index("resumed")
        text = "".join(chunk_text(chunk["choices"][0]) for chunk in received.chunks[:first])
        assert text
        assert undisturbed.text.startswith(text)
        assert (received.done_count, received.errors, received.token_counts) == (
            1,
            [],
            undisturbed.token_counts,
        )


@paths
@pytest.mark.parametrize(
    "extra",
    [
        {"logprobs": 1},
        {"n": 2, "temperature": 0.9},
        {"response_format": {"type": "json_object"}},
    ],
    ids="-".join,
)
async def test_stream_with_more_than_text_ends_with_error_after_cut(
    servers: list[VllmServer], path: str, extra: dict[str, object]
) -> None:
    async with cuttable_gateway(servers) as (_, client, cutter):
        cutter.events_left = 6
        received = await send(client, path, extra)
        assert [error["code"] for error in received.errors] == ["upstream_failed"]
        assert received.text
        assert not received.done_count


@paths
@pytest.mark.parametrize(
    "extra",
    [{"logit_bias": {"999999": 1}}, {"structured_outputs": {"regex": "(("}}],
    ids="-".join,
)
async def test_rejection_in_stream_keeps_breaker_closed(
    servers: list[VllmServer], path: str, extra: dict[str, object]
) -> None:
    async with cuttable_gateway(servers) as (running, client, _):
        for _ in range(8):
            received = await send(client, path, extra)
            assert [error["code"] for error in received.errors] == ["refused_by_replica"]
            assert (received.text, received.done_count) == ("", 0)
        assert all(replica.health.breaker.is_closed for replica in running.replicas)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP])
async def test_stream_survives_signal_to_server(
    servers: list[VllmServer], number: signal.Signals
) -> None:
    extra: dict[str, object] = {"max_tokens": 300, "ignore_eos": True}
    async with cuttable_gateway(servers, BUSY if number is signal.SIGSTOP else PATIENT) as (
        _,
        client,
        _,
    ):
        undisturbed = await send(client, COMPLETION, extra)
        try:
            # Routing alternates between the servers.
            received = await send(client, COMPLETION, extra, partial(servers[1].signal, number))
            assert_same_stream(received, undisturbed, extra)
        finally:
            servers[1].signal(signal.SIGCONT)
            if number is not signal.SIGSTOP:
                servers[1].kill()  # after SIGTERM a server may hang
                servers[1].start()
                await asyncio.to_thread(servers[1].wait_ready)


async def test_higher_priority_runs_first_in_vllm() -> None:
    """The server runs four requests at a time and schedules by priority. The gateway does not know the four."""
    started_numbers: list[int] = []

    async def send_numbered(client: httpx2.AsyncClient, number: int, priority: int) -> None:
        body = {"model": "big", "stream": True, "priority": priority, "max_tokens": 60}
        body |= BODIES[COMPLETION] | {"ignore_eos": True}
        async with client.stream("POST", COMPLETION, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and number not in started_numbers:
                    started_numbers.append(number)

    with TemporaryDirectory() as folder:
        server = VllmServer(Path(folder) / "v.sock", ("--scheduling-policy", "priority"))
        replica = ReplicaConfig(
            url=f"unix:{server.socket}", model="mini", kind="vllm", priority_scheduling=True
        )
        with run_vllm_servers(server):
            async with (
                gateway(replica, timeouts=PATIENT, client_timeout_s=None) as (running, client),
                asyncio.TaskGroup() as tasks,
            ):
                (only,) = running.replicas
                for number in range(16):
                    tasks.create_task(send_numbered(client, number, 1))
                await until(lambda: len(started_numbers) >= 4 and only.load.in_flight == 16)
                tasks.create_task(send_numbered(client, 16, 0))
    assert started_numbers.index(16) < 12, "without priority scheduling it would be the last"


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", get_args(RecipeName))
async def test_vllm_computes_with_a_quantized_model(recipe: str, tmp_path: Path) -> None:
    """Its log-probabilities of a text are close to those of Argosy's engine with the same files."""
    model, text = tmp_path / "model", "Once upon a time a small boat could not find the sea."
    calibration = write_text(tmp_path / "text.jsonl")
    status, printed = quantize(BUNDLED_MODEL, model, calibration, "--recipe", recipe)
    assert status in {0, 3}, printed  # of random words it is the quality that does not matter here
    params = SamplingParams(temperature=0.0, max_tokens=16, prompt_logprobs=0)
    with LLM(EngineConfig(model=str(model), dtype="bfloat16")) as engine:
        (own,) = engine.generate([text], params)
    assert own.prompt_logprobs is not None
    own_loss = -sum(token.logprob for token in own.prompt_logprobs) / len(own.prompt_logprobs)
    body = {"model": "mini", "prompt": text, "prompt_logprobs": 0, "temperature": 0}
    with TemporaryDirectory() as folder:
        server = VllmServer(Path(folder) / "v.sock", model=model)
        with run_vllm_servers(server):
            transport = httpx2.AsyncHTTPTransport(uds=str(server.socket))
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://vllm", timeout=120
            ) as client:
                (choice,) = (await client.post(COMPLETION, json=body)).json()["choices"]
    found = [next(iter(each.values()))["logprob"] for each in choice["prompt_logprobs"] if each]
    loss = -sum(found) / len(found)
    assert len(found) == len(own.prompt_logprobs)
    assert loss == pytest.approx(own_loss, abs=0.1)
    assert choice["text"].split()
