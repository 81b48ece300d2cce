"""Answers that are kept under a key that the client chose: who asks the same again is given the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

BESIDE = 512
"""Bytes that an answer takes beside its body, about."""


class IdempotencyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is kept, and for how long."""

    seconds: Annotated[float, Meta(gt=0, le=86_400)] = 86_400.0
    bytes: Annotated[int, Meta(ge=0)] = 64 * 1024 * 1024
    """Of all answers together, those that run included; the oldest are forgotten first."""
    answer_bytes: Annotated[int, Meta(ge=0)] = 1024 * 1024
    """Of one answer; a longer one is not kept."""


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim", gc=False):
    """The first request with a key, while it is being answered."""

    request: str
    """Its id, which no other request has."""
    digest: bytes
    """Of what it asks."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer", gc=False):
    """What it was given."""

    request: str
    digest: bytes
    kind: bytes
    """Media type."""
    body: bytes


class Answers(Protocol):
    """The keys in use and the answers that are kept. Names are of keys: no two callers' are the same."""

    async def claim(self, name: str, claim: Claim) -> Claim | Answer | None:
        """Take the name, until it is settled. What it holds already; None: it is the claim's now."""

    def hold(self, size: int) -> bool:
        """Take so many bytes for an answer that comes; whether there are so many, if older ones are forgotten."""

    def release(self, size: int) -> None:
        """Give back bytes that were held."""

    def settle(self, name: str, claim: Claim, answer: Answer | None) -> None:
        """Keep the answer that a claim got, if there is room for it; None: the name is free again."""

    async def start(self) -> None:
        """Be ready, within seconds."""

    async def close(self) -> None:
        """Bring what was settled to where it belongs."""


class _Kept(NamedTuple):
    until: float
    answer: Answer


class MemoryAnswers:
    """The `Answers` of one gateway."""

    def __init__(
        self, config: IdempotencyConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._running: dict[str, Claim] = {}
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """Oldest first."""
        self.bytes = 0
        """Of what is kept, and held."""

    @property
    def running(self) -> Mapping[str, Claim]:
        """The names that are claimed."""
        return self._running

    def __len__(self) -> int:
        return len(self._kept)

    async def claim(self, name: str, claim: Claim) -> Claim | Answer | None:
        """See `Answers`."""
        self._forget_old()
        kept = self._kept.get(name)
        if kept is not None:
            return kept.answer
        holder = self._running.setdefault(name, claim)
        return None if holder is claim else holder

    def hold(self, size: int) -> bool:
        """See `Answers`."""
        self._forget_old()
        while self._kept and self.bytes + size > self._config.bytes:
            self._forget_one()
        if self.bytes + size > self._config.bytes:
            return False
        self.bytes += size
        return True

    def release(self, size: int) -> None:
        """See `Answers`."""
        self.bytes -= size

    def settle(self, name: str, claim: Claim, answer: Answer | None) -> None:
        """See `Answers`."""
        if self._running.get(name) != claim:
            return
        del self._running[name]
        if answer is not None and self.hold(_size(answer)):
            self._kept[name] = _Kept(self._clock() + self._config.seconds, answer)

    async def start(self) -> None:
        """See `Answers`."""

    async def close(self) -> None:
        """See `Answers`."""

    def _forget_old(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget_one()

    def _forget_one(self) -> None:
        _, oldest = self._kept.popitem(last=False)
        self.bytes -= _size(oldest.answer)


def _size(answer: Answer) -> int:
    return len(answer.body) + BESIDE
