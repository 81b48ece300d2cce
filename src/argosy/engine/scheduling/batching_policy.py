"""When waiting requests may join: the batching mode, and how much KV running ones will still need."""

from __future__ import annotations

from typing import Protocol


class BatchingPolicy(Protocol):
    """Decides whether waiting sequences may join the batch in this step."""

    @property
    def max_partial_prefills(self) -> int:
        """So many may be part-way through their prompts even when one alone would use up the step."""
        ...

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """`generating` of the `running` sequences have been given a token since they joined."""
        ...


class ContinuousBatching:
    """Sequences join and leave at any step (Yu et al., Orca, OSDI 2022)."""

    max_partial_prefills = 4

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Always."""
        del running, generating, waiting, waited_s
        return True


class StaticBatching:
    """A batch is formed of what waits and runs to its end before the next one is formed."""

    max_partial_prefills = 1 << 30

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """While the batch is being formed."""
        del running, waiting, waited_s
        return generating == 0


class DynamicBatching:
    """As static, but an incomplete batch first waits for company, for a bounded time."""

    max_partial_prefills = 1 << 30

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """While the batch is being formed, once it is full or has waited long enough."""
        ready = running > 0 or waiting >= self._batch_size or waited_s >= self._max_wait_s
        return generating == 0 and ready


class OutputFractionEstimator:
    """What share of `max_tokens` requests really use, learnt as they end; a shortage makes it cautious."""

    def __init__(self, fraction: float = 0.5, learning_rate: float = 0.05) -> None:
        self.fraction = fraction
        self._learning_rate = learning_rate

    def record_end(self, used: int, allowed: int) -> None:
        """A request has ended after `used` of `allowed` output tokens."""
        if allowed > 0:
            self.fraction += self._learning_rate * (used / allowed - self.fraction)

    def record_shortage(self) -> None:
        """A running sequence had to be preempted for memory: too much was promised."""
        self.fraction = min(1.0, self.fraction * 1.25 + 0.05)
