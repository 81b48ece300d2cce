"""A stream cut after any block of its journal goes on elsewhere: together they are the undisturbed stream."""

from __future__ import annotations

import json
from binascii import a2b_base64
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from tests.support.replica_servers import Served, chat, completion, real_engine, serve

from argosy.protocol import unpack_block_names

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = "cmpl-chosen-elsewhere 1700000000"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real() -> AsyncIterator[Served]:
    async with serve(real_engine()) as served:
        yield served


@dataclass
class Told:
    """What a journaled stream told, up to some block."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    prompt: tuple[int, int] | None = None
    blocks: set[int] = field(default_factory=set)
    done: bool = False


async def stream(real: Served, path: str, body: dict[str, Any], given: str = "") -> list[Told]:
    """What was told after each block, and at the end; `given`: how many tokens the client itself had go on after."""
    headers = {"x-argosy-resume-metadata": "1", "x-argosy-response-id": ANSWER}
    headers |= {"x-argosy-resume-given": given} if given else {}
    answer = await real.client.post(path, json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    states, now = [], Told()
    for block in answer.text.split("\n\n"):
        if block.startswith(": argosy prompt "):
            words = block.split()
            now.prompt = (int(words[3]), int(words[4]))
            now.blocks = set(unpack_block_names(a2b_base64("".join(words[5:]))))
        elif block.startswith(": argosy "):
            index, ids = int(block.split(" ")[2]), block.split(" ")[3]
            told = [int(i) for i in ids.split(",") if i]
            now.tokens = now.tokens | {index: now.tokens.get(index, []) + told}
            states.append(Told(list(now.chunks), now.tokens, now.prompt))
        elif block == "data: [DONE]":
            now.done = True
        elif block:
            now.chunks = [*now.chunks, json.loads(block.removeprefix("data: "))]
    return [*states, now]


def merged(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks make, however they were cut."""
    answer: dict[str, Any] = {"identity": set(), "usage": []}
    for chunk in chunks:
        answer["identity"].add((chunk["id"], chunk["created"], chunk["model"]))
        if chunk.get("usage"):
            answer["usage"].append(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            own = answer.setdefault(choice["index"], {"roles": [], "text": "", "finish": []})
            delta = choice.get("delta", choice)
            own["roles"] += [delta["role"]] if "role" in delta else []
            own["text"] += delta.get("content", delta.get("text", ""))
            own["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, values in (choice["logprobs"] or {}).items():
                own.setdefault(name, []).extend(values or [])
    return answer


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
    "four choices with echo, the first of which ends first": (
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
async def test_a_stream_cut_after_any_block_goes_on_as_if_nothing_had_happened(
    real: Served, kind: str
) -> None:
    path, body = BODIES[kind]
    body = body | {"stream_options": {"include_usage": True}}
    *states, whole = await stream(real, path, body)
    assert whole.done
    assert states  # a busy machine merges pieces
    choices = len(whole.tokens)
    for cut in states:
        told = [cut.tokens.get(choice, []) for choice in range(choices)]
        resume = {"token_ids": told if choices > 1 else told[0]}
        *_, rest = await stream(real, path, body | {"resume": resume})
        for choice in range(choices):
            assert told[choice] + rest.tokens.get(choice, []) == whole.tokens[choice]
        assert rest.done
        assert merged(cut.chunks + rest.chunks) == merged(whole.chunks)


@pytest.mark.parametrize("kind", BODIES)
async def test_a_stream_that_goes_on_after_what_its_client_had_begins_as_any(
    real: Served, kind: str
) -> None:
    """And is carried on as any."""
    path, body = BODIES[kind]
    *_, whole = await stream(real, path, body)
    had = [whole.tokens[choice][:-1][:2] for choice in range(len(whole.tokens))]
    given = ",".join(str(len(ids)) for ids in had)

    def after(told: Told) -> dict[str, Any]:
        ids = [first + told.tokens.get(choice, []) for choice, first in enumerate(had)]
        return body | {"resume": {"token_ids": ids if len(ids) > 1 else ids[0]}}

    streamed = after(Told()) | {"stream": True}
    direct = await real.client.post(path, json=streamed, headers={"x-argosy-response-id": ANSWER})
    expected = [json.loads(line[6:]) for line in direct.text.split("\n\n")[:-2]]
    *states, journaled = await stream(real, path, after(Told()), given)
    assert merged(journaled.chunks) == merged(expected)
    for cut in states:
        *_, rest = await stream(real, path, after(cut), given)
        assert merged(cut.chunks + rest.chunks) == merged(expected)


async def test_what_is_no_count_of_tokens_is_refused(real: Served) -> None:
    path, body = BODIES["chat"]
    refused = await real.client.post(path, json=body, headers={"x-argosy-resume-given": "-1,x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-argosy-resume-given")


async def test_another_model_does_not_go_on(real: Served) -> None:
    path, body = BODIES["chat"]
    journal = {"x-argosy-resume-metadata": "1"}
    told = await real.client.post(path, json=body | {"max_tokens": 2}, headers=journal)
    assert told.status_code == 200
    same = {"x-argosy-model-digest": told.headers["x-argosy-model-digest"]}
    again = body | {"max_tokens": 2, "stream": True}
    assert (await real.client.post(path, json=again, headers=journal | same)).status_code == 200
    other = {"x-argosy-model-digest": "0" * 32}
    refused = await real.client.post(path, json=again, headers=journal | other)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "other_model")


async def test_the_journal_counts_what_the_usage_says(real: Served) -> None:
    path, body = BODIES["chat"]
    *_, whole = await stream(real, path, body | {"stream_options": {"include_usage": True}})
    usage = whole.chunks[-1]["usage"]
    assert whole.prompt == (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    assert len(whole.tokens[0]) == usage["completion_tokens"]


async def test_the_journal_names_the_blocks_that_the_prompt_became(real: Served) -> None:
    path, body = "/v1/completions", completion("A king had a daughter. " * 20, max_tokens=40)
    *_, whole = await stream(real, path, body | {"ignore_eos": True})
    assert whole.prompt is not None
    assert len(whole.blocks) == whole.prompt[0] // 16 > 0
    assert (
        whole.blocks < real.replica.engine.kv_cache_view.block_names
    )  # the answer's own are held too
    *_, again = await stream(real, path, body)
    assert again.blocks == whole.blocks
    *_, salted = await stream(real, path, body | {"cache_salt": "mine"})
    assert len(salted.blocks) == len(whole.blocks)
    assert salted.blocks.isdisjoint(whole.blocks)
    *_, two = await stream(real, path, body | {"prompt": [body["prompt"], "Once"]})
    assert not two.blocks  # whose would they be?


async def test_without_the_header_there_is_no_journal(real: Served) -> None:
    path, body = BODIES["completion"]
    answer = await real.client.post(path, json=body | {"stream": True})
    assert "argosy" not in answer.text


@pytest.mark.parametrize("told", ["x", "-1", "1.5", "99999999999999"])
async def test_nonsense_for_a_count_is_refused(real: Served, told: str) -> None:
    path, body = BODIES["completion"]
    answer = await real.client.post(path, json=body, headers={"x-argosy-cached-tokens": told})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-argosy-cached-tokens"


@pytest.mark.parametrize("told", ["x", "id", "id 1.5", "two ids 12", "id 99999999999999"])
async def test_nonsense_for_an_identity_is_refused(real: Served, told: str) -> None:
    path, body = BODIES["completion"]
    answer = await real.client.post(path, json=body, headers={"x-argosy-response-id": told})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-argosy-response-id"
