"""Batching policies, which decide when waiting sequences may join the batch, and an estimator of output lengths."""

from __future__ import annotations

from typing import Protocol


class BatchingPolicy(Protocol):
    """Policy that decides whether waiting sequences may join the batch in this step."""

    @property
    def max_partial_prefills(self) -> int:
        """Maximum number of sequences in prefill at once when the first of them would use up the token budget."""
        ...

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Return whether a waiting sequence may join now.

        Args:
            running: Sequences in the batch.
            generating: Running sequences that have produced a token.
            waiting: Queued sequences.
            waited_s: Waiting time of the queue's head.
        """
        ...


class ContinuousBatching:
    """Policy by which sequences join and exit the batch at any step (Yu et al., Orca, OSDI 2022)."""

    max_partial_prefills = 4

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Return True."""
        del running, generating, waiting, waited_s
        return True


class StaticBatching:
    """Policy by which a batch of waiting sequences runs to its end before the next batch is formed."""

    max_partial_prefills = 1 << 30

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Return whether the batch is still being formed."""
        del running, waiting, waited_s
        return generating == 0


class DynamicBatching:
    """Variant of static batching in which an incomplete batch first waits up to `max_wait_s` for more sequences."""

    max_partial_prefills = 1 << 30

    def __init__(self, batch_size: int, max_wait_s: float) -> None:
        self._batch_size = batch_size
        self._max_wait_s = max_wait_s

    def can_admit(self, *, running: int, generating: int, waiting: int, waited_s: float) -> bool:
        """Return whether the batch is still being formed, and is full or has waited `max_wait_s`."""
        ready = running > 0 or waiting >= self._batch_size or waited_s >= self._max_wait_s
        return generating == 0 and ready


class OutputFractionEstimator:
    """Moving average of the fraction of `max_tokens` that requests use. A shortage of blocks raises it."""

    def __init__(self, fraction: float = 0.5, learning_rate: float = 0.05) -> None:
        self.fraction = fraction
        self._learning_rate = learning_rate

    def record_end(self, used: int, allowed: int) -> None:
        """Record that a request ended after `used` of `allowed` output tokens."""
        if allowed > 0:
            self.fraction += self._learning_rate * (used / allowed - self.fraction)

    def record_shortage(self) -> None:
        """Record that a running sequence was preempted for lack of blocks, so the estimate was too low."""
        self.fraction = min(1.0, self.fraction * 1.25 + 0.05)
