"""Sleep: seconds and bytes by level, and many models in the memory of a few under mixed load.

python -m benchmarks.sleep levels --shape qwen2-0.5b
python -m benchmarks.sleep swaps --models 6 --awake 2 --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import make_checkpoint
from benchmarks.server_process import RunningServer, run_server

ANSWER_MARGIN_S = 1.0
"""Time beside the waking in which a model that slept has to begin its answer."""
MEMORY_REPORT_S = 4.0
"""Time after which a gateway knows the memory of a replica that has fallen asleep."""
PROMPT_TOKENS = 512
KV_TOKENS = 8192


def measure_levels(shape: str) -> Iterator[dict[str, Any]]:
    """Measure a core in this process: its memory, and the seconds of sleep, waking and the first token after it."""
    from argosy.engine.engine_config import EngineConfig
    from argosy.engine.engine_request import EngineRequest
    from argosy.engine.serving.engine_core.core import EngineCore
    from argosy.process import private_memory_bytes, return_free_memory
    from argosy.protocol import SamplingParams
    from argosy.telemetry import configure_logging

    configure_logging("console", "warning")

    def memory() -> int:
        gc.collect()
        return_free_memory()
        return private_memory_bytes()

    def first_token_s(number: int) -> float:
        started_at = time.monotonic()
        prompt = [(number * 31 + n * 7) % 1000 + 5 for n in range(PROMPT_TOKENS)]
        core.add(EngineRequest(id="r", prompt=prompt, params=SamplingParams(max_tokens=1)))
        while core.has_work:
            core.step()
        return time.monotonic() - started_at

    with tempfile.TemporaryDirectory() as folder:
        path = BUNDLED_MODEL if shape == "mini" else make_checkpoint(shape, Path(folder))
        config = EngineConfig(
            model=str(path), kv_memory_bytes=1 << 30, max_model_len=4096, host_kv_bytes=64 << 20
        )
        core = EngineCore(config, time.monotonic, lambda *_: None)  # packs the weights
        core.set_sleep_level(2)
        core.close()
        del core
        before = memory()
        started_at = time.monotonic()
        core = EngineCore(config, time.monotonic, lambda *_: None)
        load_s = time.monotonic() - started_at
        for number in range(KV_TOKENS // PROMPT_TOKENS):
            first_token_s(number)
        yield {"what": "awake", "load_s": load_s, "private_mib": (memory() - before) / 2**20}
        for level in (1, 2):
            for round_number in range(3):
                slept = core.set_sleep_level(level)
                asleep = memory()
                woken = core.set_sleep_level(0)
                token_s = first_token_s(100 + round_number)
                yield {
                    "what": f"level {level}",
                    "sleep_s": slept.seconds,
                    "asleep_private_mib": (asleep - before) / 2**20,
                    "wake_s": woken.seconds,
                    "first_token_s": token_s,
                    "swap_s": woken.seconds + token_s,
                }
                for number in range(KV_TOKENS // PROMPT_TOKENS):
                    first_token_s(number)


async def run_swaps(
    num_models: int, num_awake: int, seconds: float, rate: float, model: str
) -> dict[str, Any]:
    """Send a mixed load to more models than the memory holds, and return what clients and the memory saw."""
    names = [f"m{number}" for number in range(num_models)]
    added = [option for name in names[1:] for option in ("--add-model", f"{name}={model}")]
    common = (model, "--served-model-name", names[0], *added, "--log-level", "warning")
    async with run_server(*common, "--sleep-after", "86400") as server:
        views = (await server.client.get("/admin/replicas")).json()["data"]
        awake_bytes = max(view["awake_bytes"] for view in views)
        body = {"replica": views[0]["replica"]}
        (await server.client.post("/admin/replicas/sleep", json=body)).raise_for_status()
        await asyncio.sleep(MEMORY_REPORT_S)
        views = (await server.client.get("/admin/replicas")).json()["data"]
        asleep_bytes = min(view["usage"]["memory_bytes"] for view in views)
    memory = num_awake * awake_bytes + (num_models - num_awake) * asleep_bytes
    memory += (awake_bytes - asleep_bytes) // 2  # not enough for another one
    async with run_server(*common, "--model-memory", str(memory)) as server:
        return await _load_models(server, names, seconds, rate)


async def _load_models(
    server: RunningServer, names: list[str], seconds: float, rate: float
) -> dict[str, Any]:
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(len(names))]
    sent, answered, failures = Counter[str](), Counter[str](), list[str]()
    asleep_s: list[float] = []
    awake_s: list[float] = []

    async def statuses() -> dict[str, dict[str, Any]]:
        listed = (await server.client.get("/admin/replicas")).json()["data"]
        return {view["model"]: view for view in listed}

    async def ask(name: str) -> None:
        view = (await statuses())[name]
        started_at, first_s = time.monotonic(), None
        body = {
            "model": name,
            "messages": [{"role": "user", "content": f"Tell me about {draw.random()}"}],
            "max_tokens": draw.choice([8, 32, 64]),
            "stream": True,
        }
        try:
            async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if first_s is None and line.startswith("data:") and '"content":"' in line:
                        first_s = time.monotonic() - started_at
                    if line == "data: [DONE]":
                        answered[name] += 1
            if first_s is None:
                failures.append(f"{name}: no token, status {response.status_code}")
                return
        except Exception as error:  # noqa: BLE001 - any is a lost request
            failures.append(f"{name}: {error!r}")
            return
        if view["status"] == "sleeping":
            asleep_s.append(first_s - view["wake_s"])
        else:
            awake_s.append(first_s)

    tasks = set[asyncio.Task[None]]()
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        (name,) = draw.choices(names, weights)
        sent[name] += 1
        task = asyncio.create_task(ask(name))
        tasks.add(task)
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*tasks)
    events = (await server.client.get("/admin/replicas/events?limit=1000")).json()["data"]
    changes = sum(event["status"] == "sleeping" for event in events)
    return {
        "requests": sum(sent.values()),
        "answered": sum(answered.values()),
        "failures": len(failures),
        "first_failure": failures[0] if failures else "",
        "sleeps": changes,
        "sleeps_per_minute": 60 * changes / seconds,
        "found_asleep": len(asleep_s),
        "asleep_beside_wake_p50_s": statistics.median(asleep_s) if asleep_s else 0.0,
        "asleep_beside_wake_max_s": max(asleep_s, default=0.0),
        "within_margin": sum(each <= ANSWER_MARGIN_S for each in asleep_s),
        "awake_first_token_p50_s": statistics.median(awake_s) if awake_s else 0.0,
    }


def main() -> None:
    """Print a JSON row for each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("levels", "swaps"))
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--awake", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--model", default="argosy-mini")
    options = parser.parse_args()
    if options.what == "levels":
        for row in measure_levels(options.shape):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        return
    result = asyncio.run(
        run_swaps(options.models, options.awake, options.seconds, options.rate, options.model)
    )
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
