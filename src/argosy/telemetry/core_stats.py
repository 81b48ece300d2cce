"""Statistics of an engine core, which it sends after each step and which the metrics of its replica read."""

from __future__ import annotations

import msgspec


class CoreStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """State of the core after a step.

    Fields named `*_total` are counters. They restart from 0 with the core process.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    queued_tokens: int = 0
    """Prompt tokens that wait to be computed, including those of running prefills."""
    step_tokens: int = 0
    step_s: float = 0.0
    schedule_s: float = 0.0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_query_tokens_total: int = 0
    prefix_hit_tokens_total: int = 0
    host_hit_tokens_total: int = 0
    preemptions_total: int = 0
    corrupt_blocks_total: int = 0
    phase_s_total: dict[str, float] = {}
    """Seconds by phase of the step: plan, launch, compute, sample, commit."""
    prefill_tokens_per_s: float = 0.0
    """Measured prefill rate in tokens per second. 0 means not measured yet."""
    inter_token_s: float = 0.0
    """Measured seconds between tokens of a sequence if one more sequence were running. 0 means not measured yet."""
    held: int = 0
    """Requests that wait for a grammar or an adapter. They are part of `waiting`."""
    grammar_compiles_total: int = 0
    grammar_cache_hits_total: int = 0
    grammar_compile_s_total: float = 0.0
    grammar_dead_ends_total: int = 0
    """Requests that ended because no token could continue their output."""
    masked_tokens_total: int = 0
    """Tokens sampled under a mask."""
    mask_fill_s_total: float = 0.0
    """Seconds that a thread spent on masks, while the device computed."""
    mask_wait_s_total: float = 0.0
    """Seconds for which sampling waited for masks."""
    out_of_memory_steps_total: int = 0
    """Steps that ran out of memory and were repeated in smaller steps."""
    step_token_budget: int = 0
    """Maximum number of tokens in one step, which is reduced for a while after memory ran out."""
    compute_threads: int = 0
    """CPU threads that compute. 0 on a GPU."""
    drafts_total: dict[str, int] = {}
    """Steps of a sequence with drafts, by drafter."""
    draft_tokens_total: dict[str, int] = {}
    accepted_draft_tokens_total: dict[str, int] = {}
    accepted_by_position_total: dict[str, list[int]] = {}
    """Accepted drafts by drafter, and by their position among the drafts of a step."""
    draft_gain_s_total: float = 0.0
    """Seconds of steps that sequences did not wait for, because their drafts were accepted."""
    draft_cost_s_total: float = 0.0
    """Seconds that sequences waited longer for steps, because these and the drafters worked on drafts."""
    adapters_resident: int = 0
    adapter_bytes: int = 0
    """Memory of the resident LoRA adapters, and that reserved for those being loaded."""
    adapter_loads_total: dict[str, int] = {}
    """Loads by result: `loaded` and `failed`."""
    adapter_load_s_total: float = 0.0
    adapter_wait_s_total: float = 0.0
    """Seconds for which requests waited for their adapter."""
    adapter_evictions_total: int = 0
    adapter_load_bytes_per_s: float = 0.0
    """Measured rate of loading. 0 means not measured yet."""
