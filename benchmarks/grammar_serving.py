"""Compare servers with and without grammars: throughput of a batch, and time to first token with a new schema.

    make peers/vllm; python -m benchmarks.grammar_serving [--engines argosy,vllm] [--rounds 3]

All engines serve a model of Llama's shape with random weights and the bundled model's tokenizer, one after the other in
each round. Prints a JSON line for each measurement, then one with the medians by engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx2

from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import ENGINES, ROOT, interpreter
from benchmarks.peers.worker import Settings
from benchmarks.processes import Launch, exit_on_sigterm, serve_peer

BATCH = 32
TOKENS = 96
COLD_SCHEMAS = 8
SHAPE = "llama-160m"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def person_schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has."""
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 60},
            "role": {"enum": ["admin", "user", "guest"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            f"field_{number}": {"type": "string", "maxLength": 40},
        },
        "required": ["name", "role", "age", f"field_{number}"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": person, "minItems": 20, "maxItems": 40}


def build_model(folder: Path) -> Path:
    """Make the checkpoint with the bundled model's tokenizer, if it is missing."""
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    name = f"{SHAPE}-{config['vocab_size']}"
    SHAPES[name] = SHAPES[SHAPE] | {
        field: config[field] for field in ("vocab_size", "eos_token_id", "bos_token_id")
    }
    path = make_checkpoint(name, folder)
    for file in TOKENIZER_FILES:
        (path / file).write_bytes((BUNDLED_MODEL / file).read_bytes())
    return path


def body(model: str, number: int, schema: dict[str, Any] | None, tokens: int) -> dict[str, Any]:
    """Return the body of a chat."""
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Write about {number}."}],
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": number,
        "stream": True,
    }
    if schema is None:
        return fields | {"ignore_eos": True}
    json_schema = {"name": "people", "schema": schema}
    return fields | {"response_format": {"type": "json_schema", "json_schema": json_schema}}


async def run_chat(client: httpx2.AsyncClient, fields: dict[str, Any]) -> tuple[float, int]:
    """Run a chat and return the seconds to its first content, and the number of chunks with content."""
    began, first_s, chunks = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=fields) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            if choices and choices[0]["delta"].get("content"):
                chunks += 1
                first_s = first_s or time.perf_counter() - began
    return first_s, chunks


async def measure(url: str, seed: int) -> dict[str, float]:
    """Measure one running server."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        figures: dict[str, float] = {}
        await run_chat(client, body(model, 0, None, 8))
        for name, schema in (("free", None), ("schema", person_schema(-1))):
            await run_chat(client, body(model, 0, schema, 8))  # compiles the schema
            began = time.perf_counter()
            chats = [run_chat(client, body(model, seed + n, schema, TOKENS)) for n in range(BATCH)]
            await asyncio.gather(*chats)
            figures[f"{name}_tokens_per_s"] = BATCH * TOKENS / (time.perf_counter() - began)
        for name, repeats in (("cold", 1), ("warm", 2)):
            times = []
            for number in range(COLD_SCHEMAS):
                for _ in range(repeats):
                    schema = person_schema(seed + number if name == "cold" else -1)
                    first_s, _ = await run_chat(client, body(model, number, schema, 2))
                times.append(first_s)
            figures[f"{name}_ttft_ms"] = 1000 * statistics.median(times)
        return figures


def main() -> None:
    """Run the rounds, and print figures as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=parse_choices(tuple(ENGINES)), default=["argosy", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-peers")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/argosy-bench"))  # noqa: S108 - a cache
    options = parser.parse_args()
    exit_on_sigterm()
    options.folder.mkdir(parents=True, exist_ok=True)
    model = build_model(options.folder)
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for engine in options.engines:
            launch = Launch(
                interpreter(ENGINES[engine].environment, options.environments),
                ENGINES[engine],
                Settings(
                    model=str(model),
                    weights="bf16",
                    threads=options.threads,
                    prefix_cache=True,
                    batching="continuous",
                ),
                log=options.folder / f"{engine}.log",
                patience_s=600,
            )
            with serve_peer(launch) as url:
                figures = asyncio.run(measure(url, 1000 * number))
            for figure, value in figures.items():
                values[engine, figure].append(value)
            row = {name: round(value, 2) for name, value in figures.items()}
            print(json.dumps({"engine": engine, "round": number, **row}), flush=True)
    medians: dict[str, dict[str, float]] = defaultdict(dict)
    for (engine, figure), found in values.items():
        medians[engine][figure] = round(statistics.median(found), 2)
    print(json.dumps({"medians": medians}), flush=True)


if __name__ == "__main__":
    main()
