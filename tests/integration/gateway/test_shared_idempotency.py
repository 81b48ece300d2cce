"""Idempotency keys of several gateways with one Redis: known at all of them, and what happens when somebody dies."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from redis import Redis
from tests.support.fake_engine import FakeEngine
from tests.support.idempotent_gateway import REPLAYED, Caller, before_replica, refusal
from tests.support.services import RedisServer, running_redis
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.store import CachedResponse, IdempotencyConfig, InFlightClaim
from argosy.store.idempotency_store import MemoryIdempotencyStore
from argosy.store.redis_client import KEY_PREFIX
from argosy.store.redis_idempotency_store import RedisIdempotencyStore

QUICK_S = 1.0
SOON_S = 0.01
FIRST, SECOND = InFlightClaim("r1", b"one"), InFlightClaim("r2", b"one")
FREE = InFlightClaim("r3", b"one")
ANSWER = CachedResponse("r1", b"one", b"text/plain", b"x" * 1000)


async def until_free(principal: Caller, key: str = "a") -> httpx2.Response:
    """What is answered to a request once its key is not in use."""
    while (answer := await principal.ask(key, stream=True)).status_code == 409:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(SOON_S)
    return answer


@contextlib.asynccontextmanager
async def two_gateways(
    folder: Path, tokenizer: Tokenizer, redis: RedisServer, pause_after: int | None = None
) -> AsyncIterator[tuple[Caller, Caller, FakeEngine]]:
    """Whoever asks the one and the other, in front of one replica."""
    async with before_replica(folder, tokenizer, pause_after, gateways=2, redis=redis.url) as (
        made,
        engine,
        one,
    ):
        yield one, await made.principal(gateway=1), engine


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_of_one_gateway_is_sent_again_by_another(
    stream: bool, redis: RedisServer, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with two_gateways(tmp_path, tokenizer, redis, 20) as (one, other, engine):
        asking = await one.begin(engine, stream=stream)
        assert refusal(await other.ask(stream=stream)) == (409, "idempotency_key_in_use")
        assert (await other.ask(stream=stream, seed=1)).status_code == 422
        engine.go_on.set()
        first = await asking
        again = await other.ask(stream=stream)
        while again.status_code == 409:
            again = await other.ask(stream=stream)
        assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
        assert (await other.ask(stream=stream, seed=1)).status_code == 422
        assert len(engine.requests) == 1


async def test_a_client_that_leaves_one_gateway_may_go_to_another(
    redis: RedisServer, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with two_gateways(tmp_path, tokenizer, redis, 20) as (one, other, engine):
        asking = await one.begin(engine, stream=True)
        asking.cancel()
        await engine.nothing_runs()
        engine.go_on.set()
        answer = await until_free(other)
        assert (answer.status_code, REPLAYED in answer.headers) == (200, False)
        assert len(engine.requests) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_redis_each_gateway_knows_its_own(
    how: signal.Signals, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with running_redis() as redis:
        async with two_gateways(tmp_path, tokenizer, redis) as (one, other, engine):
            before = await one.ask("before")
            redis.process.send_signal(how)
            assert (await one.ask("before")).content == before.content
            first = await one.ask("after", stream=True)
            again = await one.ask("after", stream=True)
            assert (again.content, again.headers[REPLAYED]) == (first.content, "true")
            elsewhere = await other.ask("after", stream=True)
            assert (elsewhere.status_code, REPLAYED in elsewhere.headers) == (200, False)
            assert len(engine.requests) == 3


# --- Redis itself ----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def answers(
    server: RedisServer,
    config: IdempotencyConfig = IdempotencyConfig(),  # noqa: B008 - immutable
    alive_s: float = QUICK_S,
) -> AsyncIterator[RedisIdempotencyStore]:
    """Those of a gateway that dies in the end."""
    made = RedisIdempotencyStore(
        server.url, None, config, MemoryIdempotencyStore(config), timeout_s=10, claim_ttl_s=alive_s
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def until_claimed(answers: RedisIdempotencyStore, name: str, claim: InFlightClaim) -> None:
    """Wait until the name is free, and take it."""
    while await answers.claim(name, claim) is not None:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(SOON_S)


async def test_the_claim_of_a_gateway_that_has_died_expires(redis: RedisServer) -> None:
    async with answers(redis) as one:
        async with answers(redis) as dying:
            assert await dying.claim("death", FIRST) is None
            loop = asyncio.get_running_loop()
            end = loop.time() + 2 * QUICK_S
            while loop.time() < end:  # it is renewed for as long as its gateway lives
                assert await one.claim("death", SECOND) == FIRST
                await asyncio.sleep(SOON_S)
        while (held := await one.claim("death", SECOND)) is not None:
            assert held == FIRST
            await asyncio.sleep(SOON_S)


async def test_of_two_claims_at_a_time_one_is_let_in(redis: RedisServer) -> None:
    async with answers(redis) as one, answers(redis) as other:
        for number in range(50):
            name = f"race{number}"
            told = await asyncio.gather(
                *(each.claim(name, claim) for each, claim in ((one, FIRST), (other, SECOND)))
            )
            assert sorted(held is None for held in told) == [False, True]


async def test_a_name_is_free_again_at_once_where_it_was_claimed(redis: RedisServer) -> None:
    async with answers(redis) as one:
        for number in range(50):
            claim = InFlightClaim(f"r{number}", b"")
            assert await one.claim("free", claim) is None
            one.settle_claim("free", claim, None)


async def test_all_answers_together_are_bounded(redis: RedisServer) -> None:
    config = IdempotencyConfig(max_bytes=10_000)
    async with answers(redis, config) as one, answers(redis, config) as other:
        for number in range(30):
            name, claim = f"bound{number}", InFlightClaim(f"r{number}", b"one")
            assert await one.claim(name, claim) is None
            one.settle_claim(name, claim, ANSWER)
            await one.claim(name, SECOND)  # which waits until Redis has it
        told = [await other.claim(f"bound{number}", SECOND) for number in range(30)]
    kept = [isinstance(held, CachedResponse) for held in told]
    assert kept == sorted(kept)  # the oldest have gone
    assert 7 <= sum(kept) <= 9


async def test_an_answer_that_has_expired_takes_nobodys_claim_along(redis: RedisServer) -> None:
    brief = IdempotencyConfig(retention_s=0.05)
    async with answers(redis, brief) as one, answers(redis, brief) as other:
        assert await one.claim("again", FIRST) is None
        one.settle_claim("again", FIRST, ANSWER)
        await until_claimed(one, "again", SECOND)
        assert await one.claim("next", FIRST) is None
        one.settle_claim("next", FIRST, ANSWER)
        await one.claim("next", SECOND)  # which waits until Redis has it
        assert await other.claim("again", FREE) == SECOND


async def keep(one: RedisIdempotencyStore, name: str, answer: CachedResponse) -> None:
    """Have it answered, once the name is free, and return when Redis has that."""
    await until_claimed(one, name, FIRST)
    one.settle_claim(name, FIRST, answer)
    assert await one.claim(name, SECOND) == answer


async def test_an_answer_in_the_place_of_an_expired_one_counts_once(redis: RedisServer) -> None:
    small = IdempotencyConfig(max_bytes=2000)
    async with answers(redis, small) as one, answers(redis, small) as other:
        await keep(one, "daily", ANSWER)
        await keep(one, "between", msgspec.structs.replace(ANSWER, body=b""))
        with Redis.from_url(redis.url) as itself:
            itself.delete(f"{KEY_PREFIX}answer:daily")  # as when its time is over
        await keep(other, "daily", ANSWER)
        assert isinstance(await other.claim("between", SECOND), CachedResponse)


async def test_of_many_claims_at_a_time_all_are_known_elsewhere(redis: RedisServer) -> None:
    async with answers(redis, alive_s=60) as one, answers(redis) as other:
        names = [f"crowd{number}" for number in range(500)]
        assert not any(await asyncio.gather(*(one.claim(name, FIRST) for name in names)))
        assert one.is_connected
        assert [await other.claim(name, SECOND) for name in names] == [FIRST] * len(names)


async def test_a_gateway_that_is_busy_does_not_take_redis_for_lost(redis: RedisServer) -> None:
    async def much_else() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
            time.sleep(0.25)  # noqa: ASYNC251 - what others do on this loop

    async with answers(redis, alive_s=60) as one, answers(redis) as other:
        names = [f"busy{number}" for number in range(8)]  # more at a time than one connection takes
        await asyncio.gather(*(one.claim(name, FIRST) for name in names), much_else())
        assert [await other.claim(name, SECOND) for name in names] == [FIRST] * len(names)


async def test_who_leaves_while_redis_is_asked_holds_nothing() -> None:
    with running_redis() as server:
        async with answers(server) as one, answers(server) as other:
            server.process.send_signal(signal.SIGSTOP)
            asking = asyncio.create_task(one.claim("left", FIRST))
            await asyncio.sleep(0)  # it has begun
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            server.process.send_signal(signal.SIGCONT)
            await until_claimed(one, "left", SECOND)
            assert await other.claim("left", FREE) == SECOND


async def test_what_another_gateway_has_done_meanwhile_stays() -> None:
    with running_redis() as server:
        async with answers(server) as one, answers(server) as other:
            assert await one.claim("twice", FIRST) is None
            server.program.stop()
            assert await other.claim("twice", SECOND) is None  # nobody can tell
            server.program.start()
            await until(lambda: one.is_connected and other.is_connected)
            other.settle_claim(
                "twice", SECOND, CachedResponse("r2", b"one", b"text/plain", b"theirs")
            )
            async with answers(server) as third:
                while await third.claim("twice", FREE) is None:
                    third.settle_claim("twice", FREE, None)
                one.settle_claim("twice", FIRST, ANSWER)
                held = await third.claim("twice", InFlightClaim("r4", b"one"))
                assert isinstance(held, CachedResponse)
                assert held.body == b"theirs"
