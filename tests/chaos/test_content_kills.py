"""Replicas are killed in the middle of text that a content rule removes, and others resume the stream."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest
from tests.support.gateway_client import parse_stream, run_gateway_server
from tests.support.replica_servers import CONFIG, MODEL, replica_process

from argosy.deployment import ContentRule, GatewayConfig, ModelConfig, ReplicaConfig

TEXT = "Write to jo@example.com, card 4111 1111 1111 1111, or call +49 170 1234567 today"
FILTERED = "Write to [email], card **** **** **** 1111, or call [phone] today"
PAUSES = (4, 7, 10, 14, 18, 22)
"""Tokens after which a replica is killed, most of them within a match."""


async def wait_for_pause(process: asyncio.subprocess.Process) -> asyncio.subprocess.Process:
    assert process.stdout is not None
    assert (await process.stdout.readline()).strip() == b"paused"
    return process


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
async def test_kills_in_a_match_change_nothing_of_the_filtered_text() -> None:
    for pause in PAUSES:
        async with contextlib.AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(replica_process(CONFIG)) for _ in range(2)]
            configs = [
                ReplicaConfig(url=str(client.base_url), name=f"r{number}")
                for number, (_, client) in enumerate(replicas)
            ]
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name=MODEL, replicas=configs)],
                content_rules=[ContentRule(output={"*": "redact", "card": "mask"})],
            )
            _, client = await stack.enter_async_context(run_gateway_server(config))
            prompt = f"pause at {pause}, say {TEXT}."
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "stream": True,
            }
            request = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            waits = [asyncio.create_task(wait_for_pause(process)) for process, _ in replicas]
            (paused,), others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for each in others:
                each.cancel()
            killed = paused.result()
            killed.kill()
            for process, _ in replicas:
                if process is not killed:
                    process.send_signal(signal.SIGUSR1)
            result = parse_stream((await request).text)
            assert result.is_complete, (pause, result.errors)
            assert result.text == FILTERED, pause
            assert await killed.wait() == -signal.SIGKILL
