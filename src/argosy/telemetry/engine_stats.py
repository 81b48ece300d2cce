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
    def held(self) -> int:
        """Sequences that wait for their grammar, which are part of `waiting`."""

    @property
    def grammar_compiles_total(self) -> int:
        """Grammars compiled, including refused ones."""

    @property
    def grammar_cache_hits_total(self) -> int:
        """Constrained requests whose grammar was compiled already."""

    @property
    def grammar_compile_s_total(self) -> float:
        """Seconds spent on compiling grammars."""

    @property
    def grammar_dead_ends_total(self) -> int:
        """Sequences that ended because no token could continue their output."""

    @property
    def masked_tokens_total(self) -> int:
        """Tokens sampled under a mask."""

    @property
    def mask_fill_s_total(self) -> float:
        """Seconds that a thread spent on masks, while the device computed."""

    @property
    def mask_wait_s_total(self) -> float:
        """Seconds for which sampling waited for masks."""

    @property
    def out_of_memory_steps_total(self) -> int:
        """Steps that ran out of memory."""

    @property
    def step_token_budget(self) -> int:
        """Maximum number of tokens in one step at present."""

    @property
    def compute_threads(self) -> int:
        """CPU threads that compute at present, or 0 on a GPU."""

    @property
    def phase_s_total(self) -> Mapping[str, float]:
        """Seconds spent in steps, by phase."""
