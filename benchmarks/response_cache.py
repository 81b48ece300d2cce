"""Hit rates, saved seconds and wrong answers of both caches on a generated load of conversations.

    argosy replica PATH_OF_MINILM --served-model-name minilm --port 8101
    python -m benchmarks.response_cache --embedder http://127.0.0.1:8101 [--requests 1000] [--clients 16]

The gateway runs in this process, in front of a replica that takes 200 ms for an answer. Users ask the 60 questions of
the hold-out of `benchmarks.semantic_pairs` in several wordings and in Zipf's distribution; four of ten go on with a
second turn. The replica answers with the number of the question, so a wrong answer is counted exactly. Then the Python
calls of the package for one request of each kind are counted, which time does not change. Prints a JSON line for each
case.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2

import argosy
from argosy.deployment import (
    CacheRule,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    SemanticCacheConfig,
)
from argosy.gateway import GatewayServer
from argosy.policy.paraphrase import CacheEvaluation, GuardName, guard_version
from benchmarks.semantic_pairs import HOLDOUT_EQUAL, HOLDOUT_WORDS

ANSWER_S = 0.2
FOLLOW_UP_SHARE = 0.4
SOURCE = str(Path(argosy.__file__).parent)
CASES: dict[str, tuple[bool, GuardName | None]] = {
    "off": (False, None),
    "exact": (True, None),
    "no_residual": (True, "no_residual"),
    "no_substitution": (True, "no_substitution"),
}
"""Whether there is a cache rule, and the guard of its semantic cache."""
Conversation = list[tuple[str, list[dict[str, str]]]]


def generate_load(count: int, seed: int = 1) -> list[Conversation]:
    """Return conversations with `count` requests at least: the name of the right answer, and the messages."""
    rng = random.Random(seed)
    questions = [
        [frame.format(**{name: words[index] for name, words in HOLDOUT_WORDS.items()}) for frame in frames]
        for index in range(5)
        for frames in HOLDOUT_EQUAL
    ]  # fmt: skip
    rng.shuffle(questions)
    weights = [1 / rank for rank in range(1, len(questions) + 1)]
    load, total = list[Conversation](), 0
    while total < count:
        (number,) = rng.choices(range(len(questions)), weights)
        first = [{"role": "user", "content": rng.choice(questions[number])}]
        conversation = [(f"q{number}", first)]
        if rng.random() < FOLLOW_UP_SHARE:
            answer = {"role": "assistant", "content": f"answer q{number}"}
            follow_up = {"role": "user", "content": rng.choice(["Why?", "Tell me more."])}
            conversation.append((f"q{number}-more", [*first, answer, follow_up]))
        load.append(conversation)
        total += len(conversation)
    return load


async def serve_replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer requests with the name in their field `user`."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line[15:])
                    for line in head.lower().splitlines()
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            body = await reader.readexactly(length)
            status, answer = b"404 Not Found", b"{}"
            if head.startswith(b"POST"):
                await asyncio.sleep(ANSWER_S)
                message = {"role": "assistant", "content": f"answer {json.loads(body)['user']}"}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                usage = {"prompt_tokens": 10, "completion_tokens": 40, "total_tokens": 50}
                fields: dict[str, Any] = {
                    "id": "x",
                    "object": "chat.completion",
                    "created": 1,
                    "model": "m",
                }
                fields |= {"choices": [choice], "usage": usage}
                status, answer = b"200 OK", json.dumps(fields).encode()
            writer.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (status, len(answer), answer)
            )
    writer.close()


@contextlib.asynccontextmanager
async def run_gateway(
    replica: str, embedder: str, *, has_rule: bool, guard: GuardName | None
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway in this event loop, with a client."""
    semantic = None
    if guard is not None:
        evaluation = CacheEvaluation(
            embedding_digest="unverified", pairs_digest="benchmark", guard=guard, guard_version=guard_version(),
            threshold=0.85, equal_pairs=210, hits=0, unequal_pairs=150, wrong_answers=6,
        )  # fmt: skip
        semantic = SemanticCacheConfig(
            embedding_model="minilm", guard=guard, evaluation=evaluation, max_wrong_answers=0.1, timeout_s=5.0
        )  # fmt: skip
    models = [
        ModelConfig(name="big", replicas=[ReplicaConfig(url=replica, kind="openai", model="m")]),
        ModelConfig(name="minilm", replicas=[ReplicaConfig(url=embedder, kind="openai", model="minilm")]),
    ]  # fmt: skip
    rules = [CacheRule(name="all", model="big", semantic=semantic)] if has_rule else []
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = GatewayServer(GatewayConfig(port=0, models=models, cache_rules=rules), url.set_result)
    running = asyncio.create_task(server.run())
    limits = httpx2.Limits(max_connections=None)
    try:
        async with httpx2.AsyncClient(base_url=await url, limits=limits, timeout=60) as client:
            yield client
    finally:
        server.stop()
        await running


async def ask(
    client: httpx2.AsyncClient, right: str, messages: list[dict[str, str]]
) -> httpx2.Response:
    """Send one request."""
    body = {"model": "big", "messages": messages, "temperature": 0, "user": right}
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return response


async def measure_load(
    client: httpx2.AsyncClient, load: list[Conversation], clients: int
) -> dict[str, Any]:
    """Send a load by several clients, and return what the cache did."""
    results, wrong, times_s, saved_s = Counter[str](), 0, list[float](), 0.0
    waiting = iter(load)

    async def run_client() -> None:
        nonlocal wrong, saved_s
        for conversation in waiting:
            for right, messages in conversation:
                began_at = time.monotonic()
                response = await ask(client, right, messages)
                times_s.append(time.monotonic() - began_at)
                results[response.headers.get("x-argosy-cache", "off")] += 1
                content = response.json()["choices"][0]["message"]["content"]
                wrong += content != f"answer {right}"
                path = f"/admin/requests/{response.headers['x-argosy-request']}"
                for row in (await client.get(path)).json().get("cache", ()):
                    saved_s += row.get("saved_s", 0.0)

    await asyncio.gather(*(run_client() for _ in range(clients)))
    asked = sum(results.values())
    answered = sum(results[each] for each in ("hit", "joined", "semantic"))
    return {
        "requests": asked,
        "results": dict(results),
        "hit_rate": round(answered / asked, 3),
        "wrong_answers": wrong,
        "saved_s": round(saved_s, 1),
        "median_ms": round(statistics.median(times_s) * 1000, 1),
    }


async def count_calls(client: httpx2.AsyncClient, messages: list[str]) -> int:
    """Return the fewest Python calls of the package for a request with one of these questions."""
    counts = []
    for text in messages:
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

        sys.setprofile(count)
        await ask(client, "q", [{"role": "user", "content": text}])
        sys.setprofile(None)
        counts.append(calls)
    return min(counts)


async def run(arguments: argparse.Namespace) -> None:
    """Measure all cases."""
    server = await asyncio.start_server(serve_replica, "127.0.0.1", 0)
    replica = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    load = generate_load(arguments.requests)
    async with server:
        for name, (has_rule, guard) in CASES.items():
            gateway = run_gateway(replica, arguments.embedder, has_rule=has_rule, guard=guard)
            async with gateway as client:
                await ask(client, "warm", [{"role": "user", "content": "warm up"}])
                figures = await measure_load(client, load, arguments.clients)
                new = [f"What is number {number} of {name}?" for number in range(10)]
                figures["calls_new"] = await count_calls(client, new)
                figures["calls_equal"] = await count_calls(client, new)
                if guard is not None:
                    alike = [f"What's the number {number} of {name}?" for number in range(10)]
                    figures["calls_similar"] = await count_calls(client, alike)
            print(json.dumps({"case": name} | figures), flush=True)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--embedder", required=True, help="URL of a replica of all-MiniLM-L6-v2")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=16)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
