"""Answers kept in memory, under random events: never more than allowed, the oldest forgotten first, none lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from argosy.store import CachedResponse, IdempotencyConfig, InFlightClaim
from argosy.store.idempotency_store import RESPONSE_OVERHEAD_BYTES, MemoryIdempotencyStore

CONFIG = IdempotencyConfig(
    retention_s=10, max_bytes=4 * (RESPONSE_OVERHEAD_BYTES + 100), max_response_bytes=200
)
NAMES = st.sampled_from([f"name{number}" for number in range(8)])
SIZES = st.integers(0, 3 * RESPONSE_OVERHEAD_BYTES)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def size(answer: CachedResponse) -> int:
    return len(answer.body) + RESPONSE_OVERHEAD_BYTES


class Keeping(RuleBasedStateMachine):
    """Requests come with keys, end well or not, and take bytes meanwhile; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.answers = MemoryIdempotencyStore(CONFIG, self.clock)
        self.loop = asyncio.Runner()
        self.requests = 0
        self.running: dict[str, InFlightClaim] = {}
        self.kept: dict[str, tuple[float, CachedResponse]] = {}
        """Until when, oldest first."""
        self.held: list[int] = []

    def teardown(self) -> None:
        self.loop.close()

    def expected(self, name: str) -> InFlightClaim | CachedResponse | None:
        if name in self.kept:
            return self.kept[name][1]
        return self.running.get(name)

    def make_room(self, needed: int) -> bool:
        """Forget what has to be forgotten; whether there is room then."""
        self.forget_old()
        while self.kept and self.used + needed > CONFIG.max_bytes:
            del self.kept[next(iter(self.kept))]
        return self.used + needed <= CONFIG.max_bytes

    def forget_old(self) -> None:
        now = self.clock.now
        self.kept = {name: kept for name, kept in self.kept.items() if kept[0] > now}

    @property
    def used(self) -> int:
        return sum(self.held) + sum(size(answer) for _, answer in self.kept.values())

    # --- what happens ------------------------------------------------------------------------------

    @rule(name=NAMES)
    def claim(self, name: str) -> None:
        self.forget_old()
        self.requests += 1
        claim = InFlightClaim(f"r{self.requests}", b"digest")
        expected = self.expected(name)
        assert self.loop.run(self.answers.claim(name, claim)) == expected
        if expected is None:
            self.running[name] = claim

    @rule(which=st.integers(0, 50), length=SIZES)
    @precondition(lambda self: self.running)
    def end_well(self, which: int, length: int) -> None:
        name, claim = self.pick(which)
        answer = CachedResponse(
            claim.request_id, claim.request_digest, b"text/plain", b"x" * length
        )
        self.answers.settle_claim(name, claim, answer)
        del self.running[name]
        if self.make_room(size(answer)):
            self.kept[name] = self.clock.now + CONFIG.retention_s, answer

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def fail(self, which: int) -> None:
        name, claim = self.pick(which)
        self.answers.settle_claim(name, claim, None)
        del self.running[name]

    @rule(which=st.integers(0, 50))
    @precondition(lambda self: self.running)
    def settle_what_is_not_ones_own(self, which: int) -> None:
        name, claim = self.pick(which)
        stranger = InFlightClaim("stranger", claim.request_digest)
        self.answers.settle_claim(name, stranger, CachedResponse("stranger", b"", b"", b""))

    @rule(length=SIZES)
    def hold(self, length: int) -> None:
        expected = self.make_room(length)
        assert self.answers.reserve_bytes(length) is expected
        if expected:
            self.held.append(length)

    @rule()
    @precondition(lambda self: self.held)
    def release(self) -> None:
        self.answers.release_bytes(self.held.pop())

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    def pick(self, which: int) -> tuple[str, InFlightClaim]:
        return sorted(self.running.items())[which % len(self.running)]

    # --- what holds --------------------------------------------------------------------------------

    @invariant()
    def it_is_bounded(self) -> None:
        assert 0 <= self.answers.used_bytes <= CONFIG.max_bytes
        assert self.answers.used_bytes == sum(self.held) + sum(
            size(answer) for _, answer in self.kept.values()
        )
        assert dict(self.answers.claims) == self.running


TestKeeping = Keeping.TestCase
