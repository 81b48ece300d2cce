"""Requests with an `Idempotency-Key` through a whole gateway: answered once, charged once, sent again as they were."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import openai
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import front
from tests.support.gateway_processes import sdk
from tests.support.idempotent_gateway import (
    BODIES,
    CHATS,
    COMPLETIONS,
    KEY,
    PRICE,
    REPLAYED,
    TOKENS,
    Caller,
    before_replica,
    fleet,
    refusal,
)
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Answer, Asked, Rough, plain, rough_server

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.filters.idempotency_filter import IdempotencyFilter, ResponseRecorder
from argosy.gateway.request_context import RequestContext
from argosy.store import IdempotencyConfig, create_idempotency_store

IN_USE = "idempotency_key_in_use"


def at(rough: Rough) -> ReplicaConfig:
    return ReplicaConfig(url=rough.url, kind="openai", model="rough", resume_mode="none")


@contextlib.asynccontextmanager
async def before_rough(folder: Path, script: Answer) -> AsyncIterator[tuple[Rough, Caller]]:
    """Whoever asks a gateway before a server that answers like that."""
    async with rough_server(script) as rough, fleet(folder, at(rough)) as made:
        yield rough, await made.principal()


@contextlib.asynccontextmanager
async def without_accounts() -> AsyncIterator[Caller]:
    """Whoever asks a gateway that knows nobody."""
    stage = IdempotencyFilter(create_idempotency_store(IdempotencyConfig(), None, None), 1 << 20)
    async with rough_server() as rough, front([stage], at(rough)) as running:
        yield Caller(running.client)


async def until_told(principal: Caller, line: str) -> None:
    """Wait until the gateway's metrics say so."""
    while line not in await principal.metrics():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_is_sent_again_gets_its_answer_and_costs_nothing(
    path: str, stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, requests=1) as (made, engine, principal):
        first = await principal.ask(path=path, stream=stream)
        again = await principal.ask(path=path, stream=stream)
        assert (first.status_code, again.status_code) == (200, 200), again.text
        assert again.content == first.content
        assert len(first.content) > 500
        assert again.headers["content-type"] == first.headers["content-type"]
        assert REPLAYED not in first.headers
        assert again.headers[REPLAYED] == "true"
        assert len(engine.requests) == 1
        refused = await principal.ask("b", path=path, stream=stream)
        assert refused.status_code == 429  # one a day, which the first was
        names = [answer.headers["x-argosy-request"] for answer in (first, again)]
        told = [(await principal.client.get(f"/admin/requests/{name}")).json() for name in names]
        assert [one["status"] for one in told] == ["completed", "replayed"]
        assert told[0]["idempotency"] == {"key": "a", "first": names[0], "kept": True}
        assert told[1]["idempotency"] == told[0]["idempotency"]
        assert told[1]["tokens"] == {"prompt": 0, "cached": 0, "output": 0}
        assert 'status="replayed"' in await principal.metrics()
        (row,) = await made.people.settled(1)
    assert (row.request, row.output_tokens) == (names[0], len(TOKENS))
    assert row.nano_dollars == PRICE * len(TOKENS)


async def test_the_order_of_fields_is_no_other_request(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer) as (_, engine, principal):
        fields = list(BODIES[CHATS].items())
        for _ in range(4):
            random.shuffle(fields)
            answer = await principal.client.post(CHATS, json=dict(fields), headers={KEY: "a"})
            assert answer.status_code == 200
        assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_while_the_first_runs_others_are_told_to_wait(
    stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, pause_after=20) as (_, engine, principal):
        asking = await principal.begin(engine, stream=stream)
        busy = await principal.ask(stream=stream)
        assert refusal(busy) == (409, IN_USE)
        assert int(busy.headers["retry-after-ms"]) > 0
        other = await principal.ask(stream=stream, temperature=0.5)
        assert other.status_code == 422
        engine.go_on.set()
        first = await asking
        again = await principal.ask(stream=stream)
        assert (again.status_code, again.content) == (200, first.content)
        assert len(engine.requests) == 1
        assert f'code="{IN_USE}",model="big"' in await principal.metrics()


async def test_a_key_is_of_one_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with before_replica(tmp_path, tokenizer) as (_, engine, principal):
        assert (await principal.ask(seed=5)).status_code == 200
        for answer in (
            await principal.ask(seed=6),
            await principal.ask(),
            await principal.ask(seed=5, stream=True),
            await principal.ask(path=COMPLETIONS, seed=5),
        ):
            assert refusal(answer) == (422, "idempotency_key_reused")
            assert answer.json()["error"]["param"] == KEY
        assert len(engine.requests) == 1


async def test_keys_are_of_projects(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with before_replica(tmp_path, tokenizer) as (made, engine, _):
        told = {
            who: await (await made.principal(who)).ask()
            for who in ("shop", "colleague", "other", "elsewhere")
        }
        assert {answer.status_code for answer in told.values()} == {200}
        assert [who for who, answer in told.items() if REPLAYED in answer.headers] == ["colleague"]
        assert told["colleague"].content == told["shop"].content
        assert len({answer.json()["id"] for answer in told.values()}) == 3
        assert len(engine.requests) == 3
        assert (await (await made.principal("small")).ask()).status_code == 403  # not their model


@pytest.mark.parametrize("key", ["", "two words", "ü", "x" * 256])
async def test_what_is_no_key_is_refused(key: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with before_replica(tmp_path, tokenizer) as (_, engine, principal):
        headers = [(KEY.encode(), key.encode())]
        answer = await principal.client.post(CHATS, json=BODIES[CHATS], headers=headers)
        assert refusal(answer) == (400, "invalid_idempotency_key")
        assert KEY in answer.json()["error"]["message"]
        assert not engine.requests
        assert (await principal.ask("x" * 255)).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 429, 500])
async def test_an_error_leaves_the_key_free(status: int, stream: bool, tmp_path: Path) -> None:
    fails = True

    async def script(asked: Asked) -> None:
        if fails:
            asked.json(status, {"error": {"message": "no"}})
        elif stream:
            await plain(asked)
        else:
            choice = {"index": 0, "text": "something", "finish_reason": "stop"}
            asked.json(200, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async with before_rough(tmp_path, script) as (rough, principal):
        failed = await principal.ask(path=COMPLETIONS, stream=stream)
        assert failed.status_code >= 400
        fails = False
        first = await principal.ask(path=COMPLETIONS, stream=stream)
        assert first.status_code == 200, first.text
        assert REPLAYED not in first.headers
        asked = len(rough.asked)
        again = await principal.ask(path=COMPLETIONS, stream=stream)
        assert (again.headers[REPLAYED], again.content) == ("true", first.content)
        assert len(rough.asked) == asked


async def test_a_stream_that_breaks_leaves_the_key_free(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        if len(rough.asked) > 1:
            await plain(asked)
            return
        asked.stream()
        asked.say("Once")
        await asked.writer.drain()
        asked.writer.close()

    async with before_rough(tmp_path, script) as (rough, principal):
        broken = await principal.ask(path=COMPLETIONS, stream=True)
        assert b"upstream_failed" in broken.content
        first = await principal.ask(path=COMPLETIONS, stream=True)
        assert first.content.endswith(b"data: [DONE]\n\n")
        assert REPLAYED not in first.headers


async def test_a_refusal_of_the_gateways_leaves_the_key_free(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, requests=1) as (_, _, principal):
        assert (await principal.ask("a")).status_code == 200
        for _ in range(2):
            assert refusal(await principal.ask("b")) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_a_limit_ended_is_sent_again_though_nothing_is_left(
    stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, tokens=30) as (_, engine, principal):
        first = await principal.ask(stream=stream)
        assert b'"finish_reason":"limit"' in first.content
        again = await principal.ask(stream=stream)
        assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
        assert (await principal.ask("b", stream=stream)).status_code == 429
        assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_key(
    stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, pause_after=20) as (made, engine, principal):
        asking = await principal.begin(engine, stream=stream)
        asking.cancel()
        await engine.nothing_runs()
        engine.go_on.set()
        answer = await principal.ask(stream=stream)
        assert answer.status_code == 200
        assert REPLAYED not in answer.headers
        assert len(engine.requests) == 2
        rows = await made.people.settled(2)
        assert sorted(row.status for row in rows) == ["cancelled", "completed"]


async def test_a_first_that_moves_is_sent_again_as_it_came(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    scripts = iter(
        [Script(TOKENS[:20], crash=RuntimeError("gone")), Script(TOKENS, finish="length")]
    )
    engines = [FakeEngine(tokenizer, lambda _: next(scripts)) for _ in range(2)]
    async with serve(engines[0]) as one, serve(engines[1]) as two:
        behind = [ReplicaConfig(url=served.url, model=MODEL) for served in (one, two)]
        async with fleet(tmp_path, *behind) as made:
            principal = await made.principal()
            first = await principal.ask(stream=True, return_token_ids=True)
            again = await principal.ask(stream=True, return_token_ids=True)
    assert again.content == first.content
    assert again.headers[REPLAYED] == "true"
    assert b'"error"' not in first.content
    assert [len(each.requests) for each in engines] == [1, 1]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("whole", [True, False])
async def test_an_answer_that_is_too_large_is_not_kept(
    whole: bool, stream: bool, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    kept = IdempotencyConfig(max_response_bytes=400) if whole else IdempotencyConfig(max_bytes=0)
    async with before_replica(tmp_path, tokenizer, idempotency=kept) as (_, engine, principal):
        first = await principal.ask(stream=stream)
        again = await principal.ask(stream=stream)
        assert len(first.content) > 400
        assert (again.status_code, REPLAYED in again.headers) == (200, False)
        assert len(engine.requests) == 2
        name = first.headers["x-argosy-request"]
        told = (await principal.client.get(f"/admin/requests/{name}")).json()
        assert told["idempotency"]["kept"] is False


async def test_the_oldest_are_forgotten_first(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kept = IdempotencyConfig(max_bytes=4000)
    async with before_replica(tmp_path, tokenizer, idempotency=kept) as (_, engine, principal):
        for key in ("a", "b", "c", "d", "e", "f"):
            assert (await principal.ask(key)).status_code == 200
        assert REPLAYED in (await principal.ask("f")).headers
        assert REPLAYED not in (await principal.ask("a")).headers
        assert len(engine.requests) == 7


async def test_answers_are_forgotten_in_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    kept = IdempotencyConfig(retention_s=0.2)
    async with before_replica(tmp_path, tokenizer, idempotency=kept) as (_, engine, principal):
        while REPLAYED in (await principal.ask()).headers or len(engine.requests) < 2:
            assert len(engine.requests) < 3


async def test_whoever_sends_no_key_is_always_answered_anew(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer) as (_, engine, principal):
        for _ in range(2):
            answer = await principal.client.post(CHATS, json=BODIES[CHATS])
            assert (answer.status_code, REPLAYED in answer.headers) == (200, False)
        assert len(engine.requests) == 2


async def test_before_the_first_key_all_share_one_scope() -> None:
    async with without_accounts() as principal:
        first = await principal.ask(path=COMPLETIONS, stream=True)
        again = await principal.ask(path=COMPLETIONS, stream=True)
        assert (again.content, again.headers[REPLAYED]) == (first.content, "true")


async def test_streams_with_keys_leave_nothing_for_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        async with without_accounts() as principal:
            for key in ("a", "b", "a"):
                await principal.ask(key, path=COMPLETIONS, stream=True)
        left = [
            each for each in gc.get_objects() if type(each) in {ResponseRecorder, RequestContext}
        ]
    finally:
        gc.enable()
    assert not left


async def test_the_sdk_gets_the_answer_of_the_request_that_it_gave_up(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with before_replica(tmp_path, tokenizer, pause_after=20) as (made, engine, principal):
        asking = await principal.begin(engine)
        async with sdk(made.urls[0], made.keys["shop"]) as client:
            completions = client.with_options(max_retries=5).chat.completions

            async def create(content: str) -> httpx2.Response:
                told = await completions.with_raw_response.create(
                    model="big",
                    messages=[{"role": "user", "content": content}],
                    max_tokens=60,
                    extra_headers={KEY: "a"},
                )
                return told.http_response

            retrying = asyncio.create_task(create("Tell me a story"))
            await until_told(principal, f'code="{IN_USE}"')
            engine.go_on.set()
            first, again = await asyncio.gather(asking, retrying)
            assert json.loads(again.content) == first.json()
            assert again.headers[REPLAYED] == "true"
            with pytest.raises(openai.UnprocessableEntityError) as reused:
                await create("Another one")
            assert reused.value.code == "idempotency_key_reused"
        assert len(engine.requests) == 1
