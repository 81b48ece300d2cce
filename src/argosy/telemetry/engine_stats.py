"""What a replica's metrics read of its engine core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class EngineStats(Protocol):
    """What the metrics read of the engine core's `Stats`; `*_total` restart from 0 with the core."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""

    @property
    def blocks_total(self) -> int:
        """KV blocks there are."""

    @property
    def blocks_used(self) -> int:
        """KV blocks that sequences hold."""

    @property
    def blocks_cached(self) -> int:
        """KV blocks kept for reuse."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens waiting to be computed."""

    @property
    def step_tokens(self) -> int:
        """Tokens computed by the latest step."""

    @property
    def step_s(self) -> float:
        """Seconds it took."""

    @property
    def schedule_s(self) -> float:
        """Seconds of it that scheduling took."""

    @property
    def prompt_tokens_total(self) -> int:
        """Prompt tokens computed or found."""

    @property
    def generated_tokens_total(self) -> int:
        """Tokens generated."""

    @property
    def prefix_query_tokens_total(self) -> int:
        """Prompt tokens looked up in the prefix cache."""

    @property
    def prefix_hit_tokens_total(self) -> int:
        """Prompt tokens found there."""

    @property
    def host_hit_tokens_total(self) -> int:
        """Prompt tokens found in the host tier."""

    @property
    def preemptions_total(self) -> int:
        """Sequences put back."""

    @property
    def corrupt_blocks_total(self) -> int:
        """Host blocks dropped for a wrong checksum."""

    @property
    def phase_s_total(self) -> Mapping[str, float]:
        """Seconds that steps have spent, by phase."""
