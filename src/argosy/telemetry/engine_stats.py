"""Interface through which a replica's metrics read the statistics of its engine core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class EngineStats(Protocol):
    """Statistics of the engine core. Totals (`*_total`) restart from 0 with the core's process."""

    @property
    def running(self) -> int:
        """Sequences in the running batch."""

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""

    @property
    def blocks_total(self) -> int:
        """All KV blocks."""

    @property
    def blocks_used(self) -> int:
        """KV blocks that sequences hold."""

    @property
    def blocks_cached(self) -> int:
        """KV blocks that the prefix cache keeps for reuse."""

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not computed yet."""

    @property
    def step_tokens(self) -> int:
        """Tokens computed by the latest step."""

    @property
    def step_s(self) -> float:
        """Duration of the latest step in seconds."""

    @property
    def schedule_s(self) -> float:
        """Seconds of the latest step spent on scheduling."""

    @property
    def prompt_tokens_total(self) -> int:
        """Prompt tokens computed or found in the prefix cache."""

    @property
    def generated_tokens_total(self) -> int:
        """Generated tokens."""

    @property
    def prefix_query_tokens_total(self) -> int:
        """Prompt tokens looked up in the prefix cache."""

    @property
    def prefix_hit_tokens_total(self) -> int:
        """Prompt tokens found in the prefix cache."""

    @property
    def host_hit_tokens_total(self) -> int:
        """Prompt tokens found in the host tier of the cache."""

    @property
    def preemptions_total(self) -> int:
        """Preempted sequences."""

    @property
    def corrupt_blocks_total(self) -> int:
        """Host blocks dropped because of a wrong checksum."""

    @property
    def phase_s_total(self) -> Mapping[str, float]:
        """Seconds spent in steps, by phase."""
