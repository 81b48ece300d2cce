"""Idempotency store in memory as a state machine, and cancellation of the tasks that share it by Redis."""

from __future__ import annotations

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.fake_clock import FakeClock

from argosy.store import CachedResponse, IdempotencyConfig, InFlightClaim
from argosy.store.idempotency_store import RESPONSE_OVERHEAD_BYTES, MemoryIdempotencyStore
from argosy.store.redis_client import cancel_task

CONFIG = IdempotencyConfig(
    retention_s=10, max_bytes=4 * (RESPONSE_OVERHEAD_BYTES + 100), max_response_bytes=200
)
KEYS = st.sampled_from([f"tenant.key{number}" for number in range(8)])
SIZES = st.integers(0, 3 * RESPONSE_OVERHEAD_BYTES)


def size_bytes(response: CachedResponse) -> int:
    return len(response.body) + RESPONSE_OVERHEAD_BYTES


class MemoryStore(RuleBasedStateMachine):
    """Requests claim keys, reserve memory, and complete or fail while time passes.

    The memory is bounded, the oldest responses are evicted first, and none is lost early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(100.0)
        self.store = MemoryIdempotencyStore(CONFIG, self.clock)
        self.runner = asyncio.Runner()
        self.num_requests = 0
        self.running: dict[str, InFlightClaim] = {}
        self.stored: dict[str, tuple[float, CachedResponse]] = {}
        """Expiry and response by key, oldest first."""
        self.reserved: list[int] = []

    def teardown(self) -> None:
        self.runner.close()

    def expected(self, key: str) -> InFlightClaim | CachedResponse | None:
        if key in self.stored:
            return self.stored[key][1]
        return self.running.get(key)

    def evict_for(self, needed_bytes: int) -> bool:
        """Evict the oldest responses as far as necessary. Returns whether there is enough memory then."""
        self.evict_expired()
        while self.stored and self.used_bytes + needed_bytes > CONFIG.max_bytes:
            del self.stored[next(iter(self.stored))]
        return self.used_bytes + needed_bytes <= CONFIG.max_bytes

    def evict_expired(self) -> None:
        now = self.clock.now
        self.stored = {key: entry for key, entry in self.stored.items() if entry[0] > now}

    @property
    def used_bytes(self) -> int:
        return sum(self.reserved) + sum(
            size_bytes(response) for _, response in self.stored.values()
        )

    # --- events ------------------------------------------------------------------------------------

    @rule(key=KEYS)
    def claim(self, key: str) -> None:
        self.evict_expired()
        self.num_requests += 1
        claim = InFlightClaim(f"r{self.num_requests}", b"digest")
        expected = self.expected(key)
        assert self.runner.run(self.store.claim(key, claim)) == expected
        if expected is None:
            self.running[key] = claim

    @rule(index=st.integers(0, 50), length=SIZES)
    @precondition(lambda self: self.running)
    def complete(self, index: int, length: int) -> None:
        key, claim = self.pick(index)
        response = CachedResponse(
            claim.request_id, claim.request_digest, b"text/plain", b"x" * length
        )
        self.store.settle_claim(key, claim, response)
        del self.running[key]
        self.evict_expired()
        size = size_bytes(response)
        if size + sum(self.reserved) <= CONFIG.max_bytes and self.evict_for(size):
            self.stored[key] = self.clock.now + CONFIG.retention_s, response

    @rule(index=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def fail(self, index: int) -> None:
        key, claim = self.pick(index)
        self.store.settle_claim(key, claim, None)
        del self.running[key]

    @rule(index=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def settle_foreign_claim(self, index: int) -> None:
        key, claim = self.pick(index)
        stranger = InFlightClaim("stranger", claim.request_digest)
        self.store.settle_claim(key, stranger, CachedResponse("stranger", b"", b"", b""))

    @rule(length=SIZES)
    def reserve(self, length: int) -> None:
        expected = self.evict_for(length)
        assert self.store.reserve_bytes(length) is expected
        if expected:
            self.reserved.append(length)

    @rule()
    @precondition(lambda self: self.reserved)
    def release(self) -> None:
        self.store.release_bytes(self.reserved.pop())

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def pick(self, index: int) -> tuple[str, InFlightClaim]:
        return sorted(self.running.items())[index % len(self.running)]

    # --- invariants --------------------------------------------------------------------------------

    @invariant()
    def memory_is_bounded(self) -> None:
        assert 0 <= self.store.used_bytes <= CONFIG.max_bytes
        assert self.store.used_bytes == sum(self.reserved) + sum(
            size_bytes(response) for _, response in self.stored.values()
        )
        assert dict(self.store.claims) == self.running


async def test_responses_of_one_tenant_evict_none_of_a_smaller_one() -> None:
    store, claim = MemoryIdempotencyStore(CONFIG), InFlightClaim("r", b"digest")

    async def complete(key: str) -> None:
        assert await store.claim(key, claim) is None
        store.settle_claim(key, claim, CachedResponse("r", b"digest", b"text/plain", b"x" * 100))

    await complete("quiet.key")
    for number in range(20):
        await complete(f"busy.key{number}")
    assert store.reserve_bytes(CONFIG.max_bytes // 2)
    assert len(store) == 2
    for key in ("quiet.key", "busy.key19"):
        assert isinstance(await store.claim(key, claim), CachedResponse)


TestMemoryStore = MemoryStore.TestCase
TestMemoryStore.settings = settings(max_examples=50)


async def test_task_that_loses_cancellations_is_cancelled_again() -> None:
    """`asyncio.wait_for` of Python 3.11 may lose a cancellation."""
    started = asyncio.Event()

    async def lose_two_cancellations() -> None:
        for _ in range(2):
            try:
                started.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        await asyncio.Event().wait()

    task = asyncio.create_task(lose_two_cancellations())
    await started.wait()
    await cancel_task(task)
    assert task.cancelled()
    await cancel_task(task)
