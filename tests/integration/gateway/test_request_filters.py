"""What every request passes: stages are entered and left once, told of each token, and can end an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import Running, Watching, front
from tests.support.replica_servers import MODEL, completion, events, serve
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.backends import BackendKind
from argosy.protocol import ApiError

TOKENS = list(range(100, 112))
CHAT: dict[str, Any] = {
    "model": "big",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 12,
}
PATHS = ("/v1/chat/completions", "/v1/completions")


def body(path: str, **extra: object) -> dict[str, Any]:
    if path == PATHS[0]:
        return CHAT | extra
    return completion("Once", max_tokens=12) | {"model": "big"} | extra


@contextlib.asynccontextmanager
async def ours(
    tokenizer: Tokenizer, *stages: Watching
) -> AsyncIterator[tuple[Running, FakeEngine]]:
    """A gateway in front of our replica around a scripted engine."""
    engine = FakeEngine(tokenizer, lambda _: Script(list(TOKENS), finish="length"))
    async with (
        serve(engine) as served,
        front(stages, ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        yield running, engine


def finishes(chunks: list[bytes]) -> dict[int, str]:
    told: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in json.loads(chunk)["choices"]:
            if choice["finish_reason"] is not None:
                assert choice["index"] not in told
                told[choice["index"]] = choice["finish_reason"]
    return told


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [True, False])
async def test_all_that_is_delivered_is_counted(
    tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    watching = Watching()
    async with ours(tokenizer, watching) as (running, _):
        answer = await running.client.post(path, json=body(path, stream=stream))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-watched"] == "yes"
    (context,) = watching.left
    assert context.status == "completed"
    assert watching.counts == sorted(set(watching.counts))
    assert watching.counts[-1] == context.delivered.output_tokens == 12
    assert context.delivered.prompt_tokens > 0
    assert context.delivered.cached_tokens == min(3, context.delivered.prompt_tokens)
    assert context.replica_name.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("most", [1, 2, 7, 11])
async def test_a_limit_ends_a_stream_at_the_token(
    tokenizer: Tokenizer, path: str, most: int
) -> None:
    watching = Watching(most=most)
    async with ours(tokenizer, watching) as (running, engine):
        options = {"include_usage": True}
        asked = body(path, stream=True, return_token_ids=True, stream_options=options)
        answer = await running.client.post(path, json=asked)
        await engine.nothing_runs()
    chunks = events(answer.content)
    assert chunks[-1] == b"[DONE]"
    assert finishes(chunks) == {0: "budget"}
    told = [json.loads(chunk) for chunk in chunks[:-1]]
    ids = [
        i for chunk in told for choice in chunk["choices"] for i in choice.get("token_ids") or ()
    ]
    *before, counted = [0, *watching.counts]
    assert before[-1] < most <= counted
    assert ids == TOKENS[:counted]
    assert told[-1]["usage"]["completion_tokens"] == counted
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in told}) == 1
    (context,) = watching.left
    assert (context.status, context.delivered.output_tokens) == ("stopped", counted)


@pytest.mark.parametrize(("kind", "most"), [("openai", 5), ("openai", 12), ("llama.cpp", 12)])
async def test_a_stream_that_was_there_at_once_ends_once(kind: BackendKind, most: int) -> None:
    """Its server had ended it before the limit did."""

    async def at_once(asked: Asked) -> None:
        asked.stream()
        for place in range(12):
            asked.say(f" {place}")
        asked.say("", "length")
        asked.end(tokens=12)

    watching = Watching(most=most)
    async with (
        rough_server(at_once) as rough,
        front([watching], ReplicaConfig(url=rough.url, kind=kind, model="rough")) as running,
    ):
        asked = body(PATHS[1], stream=True, stream_options={"include_usage": True})
        answer = await running.client.post(PATHS[1], json=asked)
    *chunks, done = events(answer.content)
    assert done == b"[DONE]"
    assert b"[DONE]" not in chunks
    assert finishes([*chunks, done]) == {0: "budget"}
    usages = [json.loads(chunk).get("usage") for chunk in chunks]
    assert [usage["completion_tokens"] for usage in usages if usage] == [most]
    assert (watching.left[0].status, watching.counts[-1]) == ("stopped", most)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": False, "stream_options": {"include_usage": True}},
        {"stream_options": None, "resume": None, "prompt_logprobs": None},
    ],
    ids=["plain", "stream options", "nulls"],
)
async def test_a_limit_ends_a_whole_answer_at_the_token_too(
    tokenizer: Tokenizer, more: dict[str, Any]
) -> None:
    watching = Watching(most=5)
    async with ours(tokenizer, watching) as (running, engine):
        answer = await running.client.post(PATHS[0], json=CHAT | {"return_token_ids": True} | more)
        await engine.nothing_runs()
    told = answer.json()
    (choice,) = told["choices"]
    counted = watching.counts[-1]
    assert (choice["finish_reason"], choice["token_ids"]) == ("budget", TOKENS[:counted])
    assert told["usage"]["completion_tokens"] == counted
    assert watching.left[0].status == "stopped"


async def test_a_limit_ends_only_the_choices_that_run(tokenizer: Tokenizer) -> None:
    watching = Watching(most=12 + 3)
    async with ours(tokenizer, watching) as (running, engine):
        engine.script = lambda request: Script(
            list(TOKENS) if request.parent_id is None else TOKENS[:9],
            finish="length",
            pause_after=None if request.parent_id is None else 3,
        )
        asked = body(PATHS[0], stream=True, n=2)
        answer = await running.client.post(PATHS[0], json=asked)
    assert finishes(events(answer.content)) == {0: "length", 1: "budget"}
    assert watching.counts[-1] == 15


async def test_an_answer_that_ends_at_its_limit_is_whole(tokenizer: Tokenizer) -> None:
    watching = Watching(most=12)
    async with ours(tokenizer, watching) as (running, _):
        answer = await running.client.post(PATHS[0], json=body(PATHS[0], stream=True))
    assert finishes(events(answer.content)) == {0: "length"}
    assert watching.left[0].status == "completed"


async def test_a_limit_ends_another_servers_stream(tokenizer: Tokenizer) -> None:
    del tokenizer
    watching = Watching(most=2)
    gone = asyncio.Event()

    async def endless(asked: Asked) -> None:
        assert asked.body["stream_options"] == {"include_usage": True}
        asked.stream()
        with contextlib.suppress(ConnectionError):
            while not asked.writer.is_closing():
                asked.say("on")
                await asked.writer.drain()
                await asyncio.sleep(0.01)
        gone.set()

    async with (
        rough_server(endless) as rough,
        front([watching], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True))
        await asyncio.wait_for(gone.wait(), 30)
    chunks = events(answer.content)
    assert finishes(chunks) == {0: "budget"}
    assert chunks[-1] == b"[DONE]"
    assert watching.left[0].delivered.output_tokens == 2


@pytest.mark.parametrize("wanted", [True, False])
async def test_another_servers_usage_is_believed_and_shown_only_to_who_asked(wanted: bool) -> None:
    watching = Watching()

    async def tells(asked: Asked) -> None:
        asked.stream()
        asked.say("two tokens")
        asked.say("", "stop")
        asked.end(tokens=2)

    async with (
        rough_server(tells) as rough,
        front([watching], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        options = {"stream_options": {"include_usage": True}} if wanted else {}
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=True, **options))
    assert (b'"usage"' in answer.content) == wanted
    delivered = watching.left[0].delivered
    assert (delivered.prompt_tokens, delivered.output_tokens) == (1, 2)


@pytest.mark.parametrize("tokens", [-5, 2**63])
async def test_usage_that_cannot_be_is_not_believed(tokens: int) -> None:
    watching = Watching()

    async def lies(asked: Asked) -> None:
        if asked.body.get("stream"):
            asked.stream()
            asked.say("one token", "stop")
            asked.end(tokens=tokens)
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": tokens}
            asked.json(200, {"choices": [], "usage": usage})

    async with (
        rough_server(lies) as rough,
        front([watching], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        for stream in (True, False):
            answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=stream))
            assert answer.status_code == 200
    counts = [context.delivered.output_tokens for context in watching.left]
    assert [0 < count < 100 for count in counts] == [True, True]


async def test_a_refusal_leaves_the_stages_before_it() -> None:
    first, second = Watching(), Watching(refuses=ApiError(429, "rate_limit_exceeded", "No more."))
    async with (
        rough_server() as rough,
        front([first, second], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1]))
        assert answer.status_code == 429
        assert answer.headers.get_list("x-watched") == ["yes", "yes"]
    assert not rough.asked
    assert not second.left
    (context,) = first.left
    assert context.status == "refused"
    assert context.trace.error_code == "rate_limit_exceeded"


async def test_how_requests_end(tokenizer: Tokenizer) -> None:
    watching = Watching()
    async with ours(tokenizer, watching) as (running, engine):
        engine.script = lambda _: Script(list(TOKENS), pause_after=3)
        for stream in (True, False):
            asked = body(PATHS[0], stream=stream)
            task = asyncio.create_task(running.client.post(PATHS[0], json=asked))
            await engine.paused.wait()
            engine.paused.clear()
            task.cancel()
            await asyncio.wait_for(watching.gone.acquire(), 30)
            assert watching.left[-1].status == "cancelled"
            assert watching.left[-1].delivered.output_tokens <= 3
        refused = await running.client.post(PATHS[0], json=body(PATHS[0], temperature=-1))
        (*_, last) = watching.left
        assert (refused.status_code, last.status) == (400, "refused")
        engine.refusal = ApiError(500, "engine_error", "broken")
        for stream in (True, False):
            failed = await running.client.post(PATHS[0], json=body(PATHS[0], stream=stream))
            assert failed.status_code == 502
            assert watching.left[-1].status == "failed"
            assert watching.left[-1].delivered.output_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_refused_or_given_up_counts_no_tokens(
    tokenizer: Tokenizer, stream: bool
) -> None:
    async def refuses(asked: Asked) -> None:
        asked.json(422, {"error": {"message": "temperature is too high"}})

    watching = Watching()
    async with (
        rough_server(refuses) as rough,
        front([watching], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        answer = await running.client.post(PATHS[1], json=body(PATHS[1], stream=stream))
        assert answer.status_code == 422
    async with ours(tokenizer, watching) as (running, engine):
        engine.script = lambda _: Script(TOKENS[:3], crash=RuntimeError("gone"))
        answer = await running.client.post(PATHS[0], json=body(PATHS[0], stream=stream))
    assert answer.status_code == (200 if stream else 502)
    refused, given_up = watching.left
    assert (refused.status, given_up.status) == ("refused", "failed")
    assert (refused.delivered.prompt_tokens, refused.delivered.output_tokens) == (0, 0)
    assert given_up.delivered.output_tokens == (3 if stream else 0)


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    watching = Watching()

    async def floods(asked: Asked) -> None:
        asked.stream()
        with contextlib.suppress(ConnectionError):
            while not asked.writer.is_closing():
                asked.say("x" * 100_000)
                await asked.writer.drain()

    async with (
        rough_server(floods) as rough,
        front(
            [watching], ReplicaConfig(url=rough.url, kind="openai"), slow_reader_timeout_s=0.5
        ) as running,
    ):
        url = running.client.base_url
        reader, writer = await asyncio.open_connection(url.host, url.port, limit=1)
        asked = json.dumps(body(PATHS[1], stream=True)).encode()
        head = (
            f"POST {PATHS[1]} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(asked)}\r\n\r\n"
        )
        writer.write(head.encode() + asked)
        await asyncio.wait_for(watching.gone.acquire(), 30)
        assert watching.left[0].status == "cancelled"
        await until(lambda: watching.left[0].exchange.error_code is not None)
        assert watching.left[0].exchange.error_code == "slow_reader"
        del reader
        writer.close()
