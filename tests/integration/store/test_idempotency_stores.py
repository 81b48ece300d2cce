"""Idempotency stores of one or two gateways in Redis: contract, death of a gateway, and outages."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest
from redis import Redis
from tests.support.services import RedisServer, running_redis
from tests.support.waiting import until

from argosy.store import CachedResponse, IdempotencyConfig, IdempotencyStore, InFlightClaim
from argosy.store.idempotency_store import MemoryIdempotencyStore
from argosy.store.redis_client import KEY_PREFIX
from argosy.store.redis_idempotency_store import RedisIdempotencyStore

CLAIM_TTL_S = 1.0
POLL_INTERVAL_S = 0.01
FIRST, SECOND = InFlightClaim("r1", b"one"), InFlightClaim("r2", b"one")
THIRD = InFlightClaim("r3", b"one")
RESPONSE = CachedResponse("r1", b"one", b"text/plain", b"x" * 1000)
DEFAULT = IdempotencyConfig()


@contextlib.asynccontextmanager
async def redis_store(
    server: RedisServer, config: IdempotencyConfig = DEFAULT, claim_ttl_s: float = CLAIM_TTL_S
) -> AsyncIterator[RedisIdempotencyStore]:
    """Open the store of one gateway. Closing it leaves its claims, as the death of a gateway does."""
    local = MemoryIdempotencyStore(config)
    store = RedisIdempotencyStore(
        server.url, None, config, local, timeout_s=10, claim_ttl_s=claim_ttl_s
    )
    await store.start()
    try:
        yield store
    finally:
        await store.close()


OpenStores = Callable[..., AbstractAsyncContextManager[list[RedisIdempotencyStore]]]


@pytest.fixture(params=[1, 2], ids=["one-gateway", "two-gateways"])
def open_stores(request: pytest.FixtureRequest, redis: RedisServer) -> OpenStores:
    """Opens the stores of the gateways that get the first and the second request."""

    @contextlib.asynccontextmanager
    async def open_(
        config: IdempotencyConfig = DEFAULT,
    ) -> AsyncIterator[list[RedisIdempotencyStore]]:
        with Redis.from_url(redis.url) as client:
            client.flushall()
        async with contextlib.AsyncExitStack() as stack:
            stores = [
                await stack.enter_async_context(redis_store(redis, config))
                for _ in range(request.param)
            ]
            yield [stores[0], stores[-1]]

    return open_


async def claim_when_free(store: IdempotencyStore, key: str, claim: InFlightClaim) -> None:
    """Claim a key as soon as it is free."""
    while await store.claim(key, claim) is not None:  # noqa: ASYNC110 - there is no notification
        await asyncio.sleep(POLL_INTERVAL_S)


async def claim_when_settled(
    store: IdempotencyStore, key: str, claim: InFlightClaim
) -> CachedResponse | None:
    """Claim a key whose first request has ended. Returns its response, or None if the claim succeeded."""
    while isinstance(existing := await store.claim(key, claim), InFlightClaim):  # noqa: ASYNC110 - as above
        await asyncio.sleep(POLL_INTERVAL_S)
    return existing


# --- contract ------------------------------------------------------------------------------------


@pytest.mark.parametrize("response", [None, RESPONSE], ids=["failed", "completed"])
async def test_claimed_key_is_in_use_until_its_holder_settles_it(
    open_stores: OpenStores, response: CachedResponse | None
) -> None:
    async with open_stores() as (first, second):
        assert await first.claim("key", FIRST) is None
        for foreign in (RESPONSE, None):  # only the holder can settle the claim
            second.settle_claim("key", SECOND, foreign)
            assert await second.claim("key", SECOND) == FIRST
        first.settle_claim("key", FIRST, response)
        assert await claim_when_settled(second, "key", SECOND) == response
        if response is None:
            assert await first.claim("key", THIRD) == SECOND


async def test_key_is_free_for_same_gateway_immediately_after_failure(
    open_stores: OpenStores,
) -> None:
    async with open_stores() as (first, _):
        for number in range(50):
            claim = InFlightClaim(f"r{number}", b"")
            assert await first.claim("key", claim) is None
            first.settle_claim("key", claim, None)


async def test_exactly_one_of_two_concurrent_claims_succeeds(open_stores: OpenStores) -> None:
    async with open_stores() as (first, second):
        for number in range(50):
            existing = await asyncio.gather(
                first.claim(f"key{number}", FIRST),
                second.claim(f"key{number}", SECOND),
            )
            assert sorted(each is None for each in existing) == [False, True]


async def test_forgotten_response_is_computed_again(open_stores: OpenStores) -> None:
    async with open_stores() as (first, second):
        assert await first.claim("key", FIRST) is None
        first.settle_claim("key", FIRST, RESPONSE)
        assert await claim_when_settled(second, "key", SECOND) == RESPONSE
        for store in (first, second):
            await store.forget("key")
        assert await second.claim("key", SECOND) is None


async def test_response_expires_after_retention(open_stores: OpenStores) -> None:
    async with open_stores(IdempotencyConfig(retention_s=0.05)) as (first, second):
        assert await first.claim("key", FIRST) is None
        first.settle_claim("key", FIRST, RESPONSE)
        await claim_when_free(second, "key", SECOND)


async def test_oldest_responses_are_evicted_above_max_bytes(open_stores: OpenStores) -> None:
    async with open_stores(IdempotencyConfig(max_bytes=10_000)) as (first, second):
        for number in range(30):
            key, claim = f"key{number}", InFlightClaim(f"r{number}", b"one")
            assert await first.claim(key, claim) is None
            first.settle_claim(key, claim, RESPONSE)
        existing = [
            await claim_when_settled(second, f"key{number}", SECOND) for number in range(30)
        ]
    is_stored = [each is not None for each in existing]
    assert is_stored == sorted(is_stored), "the oldest are evicted first"
    assert 6 <= sum(is_stored) <= 9


async def test_expired_response_leaves_new_claim_of_same_key(open_stores: OpenStores) -> None:
    async with open_stores(IdempotencyConfig(retention_s=0.05)) as (first, second):
        assert await first.claim("again", FIRST) is None
        first.settle_claim("again", FIRST, RESPONSE)
        await claim_when_free(first, "again", SECOND)
        assert await first.claim("next", FIRST) is None
        first.settle_claim("next", FIRST, RESPONSE)
        await claim_when_free(second, "next", SECOND)
        assert await second.claim("again", THIRD) == SECOND


# --- Redis ---------------------------------------------------------------------------------------


async def test_claim_of_live_gateway_is_renewed_and_of_dead_gateway_expires(
    redis: RedisServer,
) -> None:
    async with redis_store(redis) as survivor:
        async with redis_store(redis) as dying:
            assert await dying.claim("dying", FIRST) is None
            loop = asyncio.get_running_loop()
            end = loop.time() + 2 * CLAIM_TTL_S
            while loop.time() < end:
                assert await survivor.claim("dying", SECOND) == FIRST
                await asyncio.sleep(POLL_INTERVAL_S)
        while (existing := await survivor.claim("dying", SECOND)) is not None:
            assert existing == FIRST
            await asyncio.sleep(POLL_INTERVAL_S)


async def store_response(store: RedisIdempotencyStore, key: str, response: CachedResponse) -> None:
    """Store a response as soon as the key is free."""
    await claim_when_free(store, key, FIRST)
    store.settle_claim(key, FIRST, response)
    assert await store.claim(key, SECOND) == response


async def test_response_that_replaces_expired_one_counts_once(redis: RedisServer) -> None:
    config = IdempotencyConfig(max_bytes=2000)
    async with redis_store(redis, config) as first, redis_store(redis, config) as second:
        await store_response(first, "daily", RESPONSE)
        await store_response(first, "between", msgspec.structs.replace(RESPONSE, body=b""))
        await claim_when_settled(second, "between", THIRD)
        with Redis.from_url(redis.url) as client:
            client.delete(f"{KEY_PREFIX}answer:daily")  # as at the end of its retention
        await store_response(second, "daily", RESPONSE)
        assert isinstance(await second.claim("between", SECOND), CachedResponse)


async def test_many_concurrent_claims_reach_other_gateway(redis: RedisServer) -> None:
    async with redis_store(redis, claim_ttl_s=60) as first, redis_store(redis) as second:
        keys = [f"many{number}" for number in range(500)]
        assert not any(await asyncio.gather(*(first.claim(key, FIRST) for key in keys)))
        assert first.is_connected
        assert [await second.claim(key, SECOND) for key in keys] == [FIRST] * len(keys)


async def test_busy_event_loop_does_not_count_as_lost_redis(redis: RedisServer) -> None:
    async def block_loop() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
            time.sleep(0.25)  # noqa: ASYNC251 - other work of this loop

    async with redis_store(redis, claim_ttl_s=60) as first, redis_store(redis) as second:
        keys = [f"busy{number}" for number in range(8)]  # more than one connection takes at a time
        await asyncio.gather(*(first.claim(key, FIRST) for key in keys), block_loop())
        assert [await second.claim(key, SECOND) for key in keys] == [FIRST] * len(keys)


async def test_cancelled_claim_holds_no_key() -> None:
    with running_redis() as server:
        async with redis_store(server) as first, redis_store(server) as second:
            server.process.send_signal(signal.SIGSTOP)
            claiming = asyncio.create_task(first.claim("key", FIRST))
            await asyncio.sleep(0)  # the claim has started
            claiming.cancel()
            with pytest.raises(asyncio.CancelledError):
                await claiming
            server.process.send_signal(signal.SIGCONT)
            await claim_when_free(first, "key", SECOND)
            assert await second.claim("key", THIRD) == SECOND


async def test_response_of_other_gateway_stored_after_outage_is_not_replaced() -> None:
    response = CachedResponse("r2", b"one", b"text/plain", b"other")
    with running_redis() as server:
        async with redis_store(server) as first, redis_store(server) as second:
            assert await first.claim("key", FIRST) is None
            server.program.stop()
            assert await second.claim("key", SECOND) is None, "each gateway uses its own memory"
            server.program.start()
            await until(lambda: first.is_connected and second.is_connected)
            second.settle_claim("key", SECOND, response)
            async with redis_store(server) as third:
                while await third.claim("key", THIRD) is None:
                    third.settle_claim("key", THIRD, None)
                first.settle_claim("key", FIRST, RESPONSE)
                existing = await third.claim("key", InFlightClaim("r4", b"one"))
                assert isinstance(existing, CachedResponse)
                assert existing.body == b"other"
