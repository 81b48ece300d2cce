"""Complete replica: a stream cut after any block continues elsewhere, and scores, disconnects and metrics are real."""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from tests.support.replica_servers import (
    MODEL,
    RunningReplica,
    bundled_model_engine,
    chat,
    completion,
    serve,
)

from argosy.protocol import unpack_block_names

pytestmark = pytest.mark.asyncio(loop_scope="module")

RESPONSE_IDENTITY = "cmpl-chosen-elsewhere 1700000000"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real_replica() -> AsyncIterator[RunningReplica]:
    async with serve(bundled_model_engine()) as replica_server:
        yield replica_server


@dataclass
class StreamState:
    """Chunks and resume metadata of a stream, up to some block."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt: tuple[int, int] | None = None
    blocks: set[int] = field(default_factory=set)
    done: bool = False


async def stream(
    real_replica: RunningReplica, path: str, body: dict[str, Any], given: str = ""
) -> list[StreamState]:
    """Return the state after each block and at the end.

    `given` is the number of tokens that the client itself sent for resuming.
    """
    headers = {"x-argosy-resume-metadata": "1", "x-argosy-response-id": RESPONSE_IDENTITY}
    headers |= {"x-argosy-resume-given": given} if given else {}
    response = await real_replica.client.post(path, json=body | {"stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    states, now = [], StreamState()
    for block in response.text.split("\n\n"):
        if block.startswith(": argosy prompt "):
            words = block.split()
            now.prompt = (int(words[3]), int(words[4]))
            now.blocks = set(unpack_block_names(a2b_base64("".join(words[5:]))))
        elif block.startswith(": argosy "):
            index, ids = int(block.split(" ")[2]), block.split(" ")[3]
            token_ids = [int(i) for i in ids.split(",") if i]
            now.tokens = now.tokens | {index: now.tokens.get(index, []) + token_ids}
            states.append(StreamState(list(now.chunks), now.tokens, now.prompt))
        elif block == "data: [DONE]":
            now.done = True
        elif block:
            now.chunks = [*now.chunks, json.loads(block.removeprefix("data: "))]
    return [*states, now]


def merge_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge chunks into one response, independently of where they were cut."""
    response: dict[str, Any] = {"identity": set(), "usage": []}
    for chunk in chunks:
        response["identity"].add((chunk["id"], chunk["created"], chunk["model"]))
        if chunk.get("usage"):
            response["usage"].append(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            own = response.setdefault(choice["index"], {"roles": [], "text": "", "finish": []})
            delta = choice.get("delta", choice)
            own["roles"] += [delta["role"]] if "role" in delta else []
            own["text"] += delta.get("content", delta.get("text", ""))
            own["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, values in (choice["logprobs"] or {}).items():
                own.setdefault(name, []).extend(values or [])
    return response


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
    "four choices with echo": (
        "/v1/completions",
        completion("The cat", seed=4, max_tokens=1, n=4, echo=True, logprobs=1),
    ),
    "two choices": ("/v1/chat/completions", chat(seed=8, max_tokens=6, n=2)),
    "two prompts": (
        "/v1/completions",
        completion(["The cat", "Once upon a time"], seed=2, max_tokens=5, stop_token_ids=[40, 41]),
    ),
    "completion": ("/v1/completions", completion("The cat", seed=9, max_tokens=10)),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_resume_after_any_block_equals_complete_stream(
    real_replica: RunningReplica, kind: str
) -> None:
    path, body = BODIES[kind]
    body = body | {"stream_options": {"include_usage": True}}
    *states, complete = await stream(real_replica, path, body)
    assert complete.done
    assert states  # a busy machine merges chunks, so the number varies
    choices = len(complete.tokens)
    for cut in states:
        delivered = [cut.tokens.get(choice, []) for choice in range(choices)]
        resume = {"token_ids": delivered if choices > 1 else delivered[0]}
        *_, rest = await stream(real_replica, path, body | {"resume": resume})
        for choice in range(choices):
            assert delivered[choice] + rest.tokens.get(choice, []) == complete.tokens[choice]
        assert rest.done
        assert merge_chunks(cut.chunks + rest.chunks) == merge_chunks(complete.chunks)


@pytest.mark.parametrize("kind", BODIES)
async def test_stream_resumed_by_client_has_equal_metadata(
    real_replica: RunningReplica, kind: str
) -> None:
    """Such a stream can be resumed again after any block."""
    path, body = BODIES[kind]
    *_, complete = await stream(real_replica, path, body)
    client_tokens = [complete.tokens[choice][:-1][:2] for choice in range(len(complete.tokens))]
    given = ",".join(str(len(ids)) for ids in client_tokens)

    def resume_body(state: StreamState) -> dict[str, Any]:
        ids = [first + state.tokens.get(choice, []) for choice, first in enumerate(client_tokens)]
        return body | {"resume": {"token_ids": ids if len(ids) > 1 else ids[0]}}

    streamed = resume_body(StreamState()) | {"stream": True}
    direct = await real_replica.client.post(
        path, json=streamed, headers={"x-argosy-response-id": RESPONSE_IDENTITY}
    )
    expected = [json.loads(line[6:]) for line in direct.text.split("\n\n")[:-2]]
    *states, resumed = await stream(real_replica, path, resume_body(StreamState()), given)
    assert merge_chunks(resumed.chunks) == merge_chunks(expected)
    for cut in states:
        *_, rest = await stream(real_replica, path, resume_body(cut), given)
        assert merge_chunks(cut.chunks + rest.chunks) == merge_chunks(expected)


async def test_resume_with_other_arithmetic_is_409(real_replica: RunningReplica) -> None:
    path, body = BODIES["chat"]
    metadata_header = {"x-argosy-resume-metadata": "1"}
    first = await real_replica.client.post(
        path, json=body | {"max_tokens": 2}, headers=metadata_header
    )
    assert first.status_code == 200
    same = {"x-argosy-arithmetic-id": first.headers["x-argosy-arithmetic-id"]}
    repeated = body | {"max_tokens": 2, "stream": True}
    assert (
        await real_replica.client.post(path, json=repeated, headers=metadata_header | same)
    ).status_code == 200
    other = {"x-argosy-arithmetic-id": "0" * 32}
    rejected = await real_replica.client.post(path, json=repeated, headers=metadata_header | other)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (409, "other_model")


async def test_metadata_token_counts_equal_usage(real_replica: RunningReplica) -> None:
    path, body = BODIES["chat"]
    *_, complete = await stream(
        real_replica, path, body | {"stream_options": {"include_usage": True}}
    )
    usage = complete.chunks[-1]["usage"]
    assert complete.prompt == (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    assert len(complete.tokens[0]) == usage["completion_tokens"]


async def test_metadata_names_kv_blocks_of_prompt(real_replica: RunningReplica) -> None:
    path, body = (
        "/v1/completions",
        completion("A king had a daughter. " * 20, max_tokens=40),
    )
    *_, complete = await stream(real_replica, path, body | {"ignore_eos": True})
    assert complete.prompt is not None
    assert len(complete.blocks) == complete.prompt[0] // 16 > 0
    assert (
        complete.blocks < real_replica.replica.engine.kv_cache_view.block_names
    )  # the replica also holds the output's blocks
    *_, repeated = await stream(real_replica, path, body)
    assert repeated.blocks == complete.blocks
    *_, salted = await stream(real_replica, path, body | {"cache_salt": "mine"})
    assert len(salted.blocks) == len(complete.blocks)
    assert salted.blocks.isdisjoint(complete.blocks)
    *_, two = await stream(real_replica, path, body | {"prompt": [body["prompt"], "Once"]})
    assert not two.blocks  # block names are ambiguous with two prompts


async def test_stream_without_header_has_no_metadata(real_replica: RunningReplica) -> None:
    path, body = BODIES["completion"]
    response = await real_replica.client.post(path, json=body | {"stream": True})
    assert "argosy" not in response.text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x-argosy-cached-tokens", ["x", "-1", "1.5", "99999999999999"]),
        ("x-argosy-response-id", ["x", "id", "id 1.5", "two ids 12", "id 99999999999999"]),
        ("x-argosy-resume-given", ["-1,x"]),
    ],
)
async def test_invalid_header_is_400(
    real_replica: RunningReplica, name: str, values: list[str]
) -> None:
    path, body = BODIES["completion"]
    for value in values:
        response = await real_replica.client.post(path, json=body, headers={name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_echoed_logprobs_equal_generated_logprobs(real_replica: RunningReplica) -> None:
    """Generated tokens have the same log-probabilities when they are an echoed prompt."""

    async def complete(prompt: object, **fields: object) -> dict[str, Any]:
        body = completion(prompt, logprobs=1, **fields)
        response = await real_replica.client.post("/v1/completions", json=body)
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

    made = await complete("The cat", temperature=0, max_tokens=5, return_token_ids=True)
    prompt = made["prompt_token_ids"] + made["token_ids"]
    scored = (await complete(prompt, max_tokens=0, echo=True))["logprobs"]
    assert scored["tokens"][-5:] == made["logprobs"]["tokens"]
    generated = made["logprobs"]["token_logprobs"]
    assert scored["token_logprobs"][-5:] == pytest.approx(generated, abs=0.1)  # bfloat16


async def test_disconnect_frees_kv_blocks(real_replica: RunningReplica) -> None:
    body = chat(stream=True, ignore_eos=True, max_tokens=1500, n=4)
    async with real_replica.client.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_bytes())
    while True:
        load = (await real_replica.client.get("/load")).json()
        if not load["server_load"] + load["running"] + load["waiting"]:
            assert load["kv_blocks_used"] == 0
            return


async def test_metrics_count_real_engine_work(real_replica: RunningReplica) -> None:
    text = (await real_replica.client.get("/metrics")).text
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("generation_tokens_total", "prefix_hit_tokens_total", "step_tokens_count"):
        assert float(shown[f'argosy_{name}{{model="{MODEL}"}}']) > 0
