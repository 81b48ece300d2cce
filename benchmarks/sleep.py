"""Sleep: seconds and bytes by level, and many models in the memory of a few under mixed load.

python -m benchmarks.sleep levels --shape qwen2-0.5b
python -m benchmarks.sleep swaps --models 6 --awake 2 --seconds 600 [--model qwen2-0.5b --rate 0.15]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from argosy.models import BUNDLED_MODEL
from argosy.policy.residency import MIN_IDLE_RELOADS, MIN_RELOAD_S
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.server_process import RunningServer, run_server

ANSWER_MARGIN_S = 1.0
"""Time beside the waking in which a model that slept has to begin its answer."""
MEMORY_REPORT_S = 4.0
"""Time after which a gateway knows the memory of a replica that has fallen asleep."""
PATTERNS = ("uniform", "zipf", "bursts")
"""Loads. The first is the worst case, since whichever models are awake, most requests are for others."""
BURST_S = 10.0
PROMPT_TOKENS = 512
KV_TOKENS = 8192
_HAS_TEXT = re.compile(r'^data:.*"text":"[^"]')


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
) -> AsyncIterator[dict[str, Any]]:
    """Yield what clients and the memory saw: of models that sleep in free memory, then of loads that exceed it.

    The loads share the time: requests for all models alike, as Zipf's law, and in bursts for one model.
    """
    names = [f"m{number}" for number in range(num_models)]
    added = [option for name in names[1:] for option in ("--add-model", f"{name}={model}")]
    common = (model, "--served-model-name", names[0], *added, "--log-level", "warning")
    async with run_server(*common, "--sleep-after", "86400") as server:
        load = _Load(server, names, rate)
        yield await load.measure_free_memory()
        views = (await load.read_views()).values()
        awake_bytes = max(view["awake_bytes"] for view in views)
        asleep_bytes = min(view["usage"]["memory_bytes"] for view in views)
    memory = num_awake * awake_bytes + (num_models - num_awake) * asleep_bytes
    memory += (awake_bytes - asleep_bytes) // 2  # not enough for another one
    async with run_server(*common, "--model-memory", str(memory)) as server:
        load = _Load(server, names, rate)
        for pattern in PATTERNS:
            yield await load.run(pattern, seconds / len(PATTERNS), num_awake)


def draw_model(pattern: str, draw: random.Random, elapsed_s: float, count: int) -> int:
    """Return the number of the model that gets a request `elapsed_s` after the start of a load."""
    if pattern == "bursts":
        return int(elapsed_s / BURST_S) % count
    weights = [1.0 if pattern == "uniform" else 1 / (rank + 1) for rank in range(count)]
    return draw.choices(range(count), weights)[0]


class _Load:
    """Requests for several models of a server, and what their clients saw."""

    def __init__(self, server: RunningServer, names: list[str], rate: float) -> None:
        self._server = server
        self._names = names
        self._rate = rate
        self._draw = random.Random(0)
        self._failures: list[str] = []
        self._asleep_s: list[float] = []
        """Times to the first token of models that slept, beyond those that their last waking took."""
        self._awake_s: list[float] = []

    async def read_views(self) -> dict[str, dict[str, Any]]:
        """Return the replica of each model."""
        listed = (await self._server.client.get("/admin/replicas")).json()["data"]
        return {view["model"]: view for view in listed}

    async def measure_free_memory(self, rounds: int = 2) -> dict[str, Any]:
        """Put each model to sleep in turn and send it a request. All have room. The first round measures wakings."""
        for number in range(rounds * len(self._names)):
            if number == len(self._names):
                self._asleep_s.clear()
            for name, view in (await self.read_views()).items():
                if name == self._names[number % len(self._names)]:
                    await self._put_to_sleep(view)
                    await self._ask(name)
        wakes_s = [view["wake_s"] for view in (await self.read_views()).values()]
        for view in (await self.read_views()).values():
            await self._put_to_sleep(view)
        await asyncio.sleep(MEMORY_REPORT_S)
        return {
            "load": "free memory",
            "wake_p50_s": statistics.median(wakes_s),
            **self._take_results(),
        }

    async def run(self, pattern: str, seconds: float, num_awake: int) -> dict[str, Any]:
        """Send requests for a time, and wait for their answers."""
        tasks = set[asyncio.Task[None]]()
        begin, began_at = time.monotonic(), time.time()
        while (elapsed_s := time.monotonic() - begin) < seconds:
            number = draw_model(pattern, self._draw, elapsed_s, len(self._names))
            tasks.add(asyncio.create_task(self._ask(self._names[number])))
            await asyncio.sleep(self._draw.expovariate(self._rate))
        await asyncio.gather(*tasks)
        lasted_s = time.monotonic() - begin
        listed = await self._server.client.get("/admin/replicas/events?limit=1000")
        sleeps = sum(
            event["status"] == "sleeping" and event["at"] >= began_at
            for event in listed.json()["data"]
        )
        wakes_s = [view["wake_s"] for view in (await self.read_views()).values()]
        turn_s = (1.0 + MIN_IDLE_RELOADS) * max(MIN_RELOAD_S, min(wakes_s))
        return {
            "load": pattern,
            "requests": len(tasks),
            "sleeps": sleeps,
            "sleeps_per_minute": 60.0 * sleeps / lasted_s,
            "most_per_minute": 60.0 * num_awake / turn_s,
            "wake_p50_s": statistics.median(wakes_s),
            **self._take_results(),
        }

    async def _put_to_sleep(self, view: dict[str, Any]) -> None:
        body = {"replica": view["replica"]}
        (await self._server.client.post("/admin/replicas/sleep", json=body)).raise_for_status()

    def _take_results(self) -> dict[str, Any]:
        asleep_s, awake_s, failures = self._asleep_s, self._awake_s, self._failures
        self._asleep_s, self._awake_s, self._failures = [], [], []
        return {
            "answered": len(asleep_s) + len(awake_s),
            "failures": len(failures),
            "first_failure": failures[0] if failures else "",
            "found_asleep": len(asleep_s),
            "within_margin": sum(each <= ANSWER_MARGIN_S for each in asleep_s),
            "asleep_beyond_wake_p50_s": statistics.median(asleep_s) if asleep_s else 0.0,
            "asleep_beyond_wake_max_s": max(asleep_s, default=0.0),
            "awake_first_token_p50_s": statistics.median(awake_s) if awake_s else 0.0,
        }

    async def _ask(self, name: str) -> None:
        view = (await self.read_views())[name]
        started_at, first_s, is_done = time.monotonic(), None, False
        body = {
            "model": name,
            "prompt": f"Tell me about {self._draw.random()}",
            "max_tokens": self._draw.choice([8, 32, 64]),
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with self._server.client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if first_s is None and _HAS_TEXT.search(line):
                        first_s = time.monotonic() - started_at
                    is_done |= line == "data: [DONE]"
        except Exception as error:  # noqa: BLE001 - any is a lost request
            self._failures.append(f"{name}: {error!r}")
            return
        if first_s is None or not is_done:
            self._failures.append(f"{name}: no whole answer, status {response.status_code}")
        elif view["status"] == "sleeping":
            self._asleep_s.append(first_s - view["wake_s"])
        else:
            self._awake_s.append(first_s)


def main() -> None:
    """Print a JSON row for each result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("levels", "swaps"))
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--awake", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=1.0, help="requests per second")
    parser.add_argument(
        "--model", default="argosy-mini", help="a model, or a shape to fill with random weights"
    )
    options = parser.parse_args()
    if options.what == "levels":
        for row in measure_levels(options.shape):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        return
    asyncio.run(_print_swaps(options))


async def _print_swaps(options: argparse.Namespace) -> None:
    model = options.model
    if model in SHAPES:
        model = str(make_checkpoint(model, Path(tempfile.gettempdir()) / "argosy-bench"))
    rows = run_swaps(options.models, options.awake, options.seconds, options.rate, model)
    async for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
