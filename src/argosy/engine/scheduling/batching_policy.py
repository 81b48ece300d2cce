"""When waiting requests may join: the batching mode, and how much KV running ones will still need."""

from __future__ import annotations

from typing import Protocol


class Batching(Protocol):
    """Decides whether waiting sequences may join the batch in this step."""

    @property
    def partial_prefills(self) -> int:
        """So many may be part-way through their prompts even when one alone would use up the step."""
        ...

    def open(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """`generating` of the `running` sequences have been given a token since they joined."""
        ...


class Continuous:
    """Sequences join and leave at any step (Yu et al., Orca, OSDI 2022)."""

    partial_prefills = 4

    def open(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Always."""
        del running, generating, waiting, waited_s
        return True


class Static:
    """A batch is formed of what waits and runs to its end before the next one is formed."""

    partial_prefills = 1 << 30

    def open(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """While the batch is being formed."""
        del running, waiting, waited_s
        return generating == 0


class Dynamic:
    """As static, but an incomplete batch first waits for company, for a bounded time."""

    partial_prefills = 1 << 30

    def __init__(self, full: int, wait_s: float) -> None:
        self._full = full
        self._wait_s = wait_s

    def open(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """While the batch is being formed, once it is full or has waited long enough."""
        ready = running > 0 or waiting >= self._full or waited_s >= self._wait_s
        return generating == 0 and ready


class OutputEstimate:
    """What share of `max_tokens` requests really use, learnt as they end; a shortage makes it cautious."""

    def __init__(self, share: float = 0.5, rate: float = 0.05) -> None:
        self.share = share
        self._rate = rate

    def ended(self, used: int, allowed: int) -> None:
        """A request has ended after `used` of `allowed` output tokens."""
        if allowed > 0:
            self.share += self._rate * (used / allowed - self.share)

    def shortage(self) -> None:
        """A running sequence had to be preempted for memory: too much was promised."""
        self.share = min(1.0, self.share * 1.25 + 0.05)
