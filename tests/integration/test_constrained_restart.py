"""A core that is killed inside constrained outputs: the next core continues them with the same tokens."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import msgspec
import pytest
from tests.support.request_deltas import all_deltas, next_delta

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.models import BUNDLED_MODEL
from argosy.protocol import ReasoningBlock, SamplingParams

PEOPLE_GRAMMAR = json.dumps(
    {
        "grammars": [
            {
                "json_schema": {
                    "type": "array",
                    "minItems": 12,
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "maxLength": 16},
                            "age": {"type": "integer", "minimum": 0, "maximum": 150},
                        },
                        "required": ["name", "age"],
                        "additionalProperties": False,
                    },
                    "x-guidance": {"whitespace_flexible": False},
                }
            }
        ]
    }
)
PARAMS = SamplingParams(max_tokens=120, grammar=PEOPLE_GRAMMAR, logprobs=0)
THINKING = msgspec.structs.replace(PARAMS, reasoning=ReasoningBlock(end_ids=(60, 62), budget=60))
CONFIG = EngineConfig(
    model=str(BUNDLED_MODEL), threads=1, max_model_len=512, num_blocks=256, warmup=False
)
REQUESTS = [
    EngineRequest(
        id=str(seed),
        prompt=[*range(20, 40), 60 + seed],
        params=msgspec.structs.replace(params, seed=seed),
    )
    for seed, params in enumerate((PARAMS, THINKING, PARAMS, THINKING))
]


async def read_and_kill(
    client: EngineClient, request: EngineRequest, kill_at: list[int]
) -> list[Delta]:
    """Read a request's deltas, and kill the core whenever the output has reached a length of `kill_at`."""
    stream = client.generate(request)
    deltas: list[Delta] = []
    while (delta := await next_delta(stream)) is not None:
        deltas.append(delta)
        if kill_at and sum(len(d.tokens) for d in deltas) >= kill_at[0] and client.core_pid:
            kill_at.pop(0)
            os.kill(client.core_pid, signal.SIGKILL)
    return deltas


@pytest.mark.parametrize(
    "kill_at", [[1, 40], pytest.param([90], marks=pytest.mark.exhaustive)], ids=str
)
async def test_killed_core_continues_constrained_outputs(kill_at: list[int]) -> None:
    client = EngineClient(CONFIG)
    await client.start()
    try:
        undisturbed = [await all_deltas(client.generate(request)) for request in REQUESTS]
        kills = [list(kill_at), [], [], []]
        outputs = await asyncio.gather(*map(read_and_kill, [client] * 4, REQUESTS, kills))
    finally:
        await client.close()
    assert client.restarts_total == len(kill_at)
    for expected, deltas in zip(undisturbed, outputs, strict=True):
        tokens = [token for delta in deltas for token in delta.tokens]
        assert tokens == [token for delta in expected for token in delta.tokens]
        assert sum(len(delta.logprobs) for delta in deltas) == len(tokens)
        assert deltas[-1].finish_reason in ("stop", "length")
        assert len([d for d in deltas if d.queue_s is not None]) == 1
