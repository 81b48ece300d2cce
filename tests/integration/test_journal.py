"""A stream cut after any block of its journal goes on elsewhere: together they are the undisturbed stream."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from tests.integration.serving import Served, chat, completion, serve

from argosy.engine import EngineConfig
from argosy.engine.serving.core.client import EngineClient
from argosy.models import BUNDLED

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = "cmpl-chosen-elsewhere 1700000000"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Served]:
    engine = EngineClient(EngineConfig(model=str(BUNDLED), threads=1, num_blocks=512, warmup=False))
    async with serve(engine) as served:
        yield served


@dataclass
class Told:
    """What a journaled stream told, up to some block."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt: tuple[int, int] | None = None
    finish: str | None = None
    done: bool = False


async def stream(real: Served, path: str, body: dict[str, Any]) -> list[Told]:
    """What was told after each block, and at the end."""
    headers = {"x-argosy-journal": "1", "x-argosy-answer": ANSWER}
    answer = await real.client.post(path, json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    states, now = [], Told()
    for block in answer.text.split("\n\n"):
        if block.startswith(": argosy prompt "):
            words = block.split()
            now.prompt = (int(words[3]), int(words[4]))
        elif block.startswith(": argosy "):
            _, _, index, ids, *finish = [*block.split(" ")]
            assert index == "0"
            now.tokens = now.tokens + [int(i) for i in ids.split(",") if i]
            now.finish = finish[0] if finish else None
            states.append(Told(list(now.chunks), now.tokens, now.prompt, now.finish))
        elif block == "data: [DONE]":
            now.done = True
        elif block:
            now.chunks = [*now.chunks, json.loads(block.removeprefix("data: "))]
    return [*states, now]


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks make, however they were cut."""
    roles, texts, finishes, usages = [], [], [], []
    logprobs: dict[str, list[Any]] = {}
    for chunk in chunks:
        if chunk.get("usage"):
            usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            delta = choice.get("delta", choice)
            if "role" in delta:
                roles.append(delta["role"])
            texts.append(delta.get("content", delta.get("text", "")))
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, values in (choice["logprobs"] or {}).items():
                logprobs.setdefault(name, []).extend(values or [])
    return {
        "identity": {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks},
        "roles": roles,
        "text": "".join(texts),
        "finish": finishes,
        "usage": [u["completion_tokens"] for u in usages],
        "logprobs": logprobs,
    }


BODIES = {
    "chat": ("/v1/chat/completions", chat(seed=3, max_tokens=14, stop=["zq"], temperature=1.3)),
    "chat with log-probabilities": (
        "/v1/chat/completions",
        chat(seed=5, max_tokens=8, logprobs=True, top_logprobs=2),
    ),
    "completion with echo": (
        "/v1/completions",
        completion("The cat", max_tokens=8, echo=True, logprobs=1, temperature=0),
    ),
    "completion": ("/v1/completions", completion("The cat", seed=9, max_tokens=10)),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_stream_cut_after_any_block_goes_on_as_if_nothing_had_happened(
    real: Served, kind: str
) -> None:
    path, body = BODIES[kind]
    body = body | {"stream_options": {"include_usage": True}}
    *states, whole = await stream(real, path, body)
    assert whole.done
    assert len(states) > 3
    for cut in states:
        if cut.finish is not None:
            continue
        *_, rest = await stream(real, path, body | {"resume": {"token_ids": cut.tokens}})
        assert cut.tokens + rest.tokens == whole.tokens
        assert rest.done
        assert merged(cut.chunks + rest.chunks) == merged(whole.chunks)


async def test_the_journal_counts_what_the_usage_says(real: Served) -> None:
    path, body = BODIES["chat"]
    *_, whole = await stream(real, path, body | {"stream_options": {"include_usage": True}})
    usage = whole.chunks[-1]["usage"]
    assert whole.prompt == (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    assert len(whole.tokens) == usage["completion_tokens"]


async def test_without_the_header_there_is_no_journal(real: Served) -> None:
    path, body = BODIES["completion"]
    answer = await real.client.post(path, json=body | {"stream": True})
    assert "argosy" not in answer.text


@pytest.mark.parametrize("told", ["x", "id", "id 1.5", "two ids 12", "id 99999999999999"])
async def test_nonsense_for_an_identity_is_refused(real: Served, told: str) -> None:
    path, body = BODIES["completion"]
    answer = await real.client.post(path, json=body, headers={"x-argosy-answer": told})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-argosy-answer"
