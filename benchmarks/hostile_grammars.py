"""Measure inter-token latency of neighbours while clients send hostile schemas, patterns and tools.

    python -m benchmarks.hostile_grammars [--seconds 20] [--neighbours 8] [--attackers 4]

Alternates quiet rounds and rounds with attackers, against one `argosy serve` with the bundled model. Prints a JSON line
for each round, and one with the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from typing import Any

import httpx2

from benchmarks.processes import exit_on_sigterm
from benchmarks.server_process import MODEL, RunningServer, run_server

CHAT = "/v1/chat/completions"


def hostile_fields() -> dict[str, dict[str, Any]]:
    """Return request fields by the name of the attack. Each is refused, or answered at a bounded cost."""
    objects = [
        {"type": "object", "properties": {f"k{i}_{j}": {"type": "string"} for j in range(100)}}
        for i in range(100)
    ]
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    node = {
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}},
    }
    schemas: dict[str, Any] = {
        "endless recursion": {
            "$ref": "#/$defs/n",
            "$defs": {"n": node | {"required": ["l", "r"]}},
        },
        "reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "deep nesting": deep,
        "thousands of properties": {
            "type": "object",
            "properties": {f"property_{i}": {"type": "integer"} for i in range(5000)},
        },
        "hundred large alternatives": {"anyOf": objects},
        "huge enum": {"enum": [f"value {i}" for i in range(100_000)]},
        "contradiction": {"type": "integer", "minimum": 5, "maximum": 4},
        "huge repetition": {"type": "string", "pattern": "^(a{1,9999}){1,9999}$"},
        "nested quantifiers": {"type": "string", "pattern": "^((a+)+)+$"},
        "huge counts": {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        "overlapping patterns": {
            "type": "object",
            "patternProperties": {f"^a.*{c}{d}$": {"type": "string"} for c in "abc" for d in "xyz"},
        },
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
            },
        }
        for i in range(2000)
    ]
    marked = {"type": "function", "function": {"name": "<tool_call>{{ 7*7 }}"}}
    fields: dict[str, dict[str, Any]] = {
        name: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": s}}
        }
        for name, s in schemas.items()
    }
    return fields | {
        "catastrophic regex": {"structured_outputs": {"regex": "(x+x+)+y|" * 50 + "(.*a){30}"}},
        "recursive grammar": {"structured_outputs": {"grammar": 'start: start start | "a"'}},
        "rubbish grammar": {"structured_outputs": {"grammar": "start: ((((" * 1000}},
        "thousands of tools": {"tools": tools, "tool_choice": "required"},
        "tool name with markup": {"tools": [marked]},
    }


async def run_neighbour(
    running: RunningServer, number: int, gaps: list[float], until: float
) -> int:
    """Stream answers until `until`, add the gaps between chunks in seconds, and return the number of answers."""
    answers = 0
    while time.monotonic() < until:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me a story about {number}."}],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        async with running.client.stream("POST", CHAT, json=body) as response:
            response.raise_for_status()
            last = None
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
        answers += 1
    return answers


async def run_attacker(
    running: RunningServer, offset: int, statuses: Counter[str], until: float
) -> None:
    """Send one hostile request after the other until `until`, and count the statuses by attack."""
    attacks = list(hostile_fields().items())
    number = offset
    while time.monotonic() < until:
        name, fields = attacks[number % len(attacks)]
        number += 1
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 8,
            **fields,
        }
        try:
            response = await running.client.post(CHAT, json=body)
            statuses[f"{name}: {response.status_code}"] += 1
        except httpx2.TransportError as error:
            statuses[f"{name}: {type(error).__name__}"] += 1


async def run_round(running: RunningServer, options: argparse.Namespace, attackers: int) -> float:
    """Run one round, print its row, and return the neighbours' p99 in milliseconds."""
    gaps: list[float] = []
    statuses: Counter[str] = Counter()
    until = time.monotonic() + options.seconds
    neighbours = [run_neighbour(running, n, gaps, until) for n in range(options.neighbours)]
    attacks = [run_attacker(running, 5 * n, statuses, until) for n in range(attackers)]
    await asyncio.gather(*neighbours, *attacks)
    cuts = statistics.quantiles(gaps, n=100)
    p99_ms = round(1000 * cuts[98], 2)
    row = {
        "attackers": attackers,
        "gaps": len(gaps),
        "itl_p50_ms": round(1000 * cuts[49], 2),
        "itl_p99_ms": p99_ms,
        "itl_max_ms": round(1000 * max(gaps), 2),
        "attacks": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
    }
    print(json.dumps(row), flush=True)
    return p99_ms


async def bench(options: argparse.Namespace) -> None:
    """Alternate quiet and hostile rounds."""
    p99: dict[int, list[float]] = {0: [], options.attackers: []}
    async with run_server() as running:
        for attackers in [*p99] * options.rounds:
            p99[attackers].append(await run_round(running, options, attackers))
    medians = {f"attackers_{n}": statistics.median(values) for n, values in p99.items()}
    print(json.dumps({"itl_p99_ms_median": medians}), flush=True)


def main() -> None:
    """Print one JSON line for each round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--neighbours", type=int, default=8)
    parser.add_argument("--attackers", type=int, default=4)
    options = parser.parse_args()
    exit_on_sigterm()
    try:
        asyncio.run(bench(options))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
