"""One sequence on its way: `tokens` it has, `computed` it has KV for, and the blocks that hold it."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from argosy.policy import INPUT_TOKEN_WEIGHT, OUTPUT_TOKEN_WEIGHT

if TYPE_CHECKING:
    from argosy.policy import TenantCounter
    from argosy.protocol import SamplingParams

NEVER = 1 << 62


class Sequence:
    """A request for one sequence, and its state. The scheduler alone changes it.

    One number chases another: a step computes some of `computed .. length`, and when it reaches
    `length` one more token is sampled, so `length` grows. Prefill, decode, prefix hits, resume and
    recomputation after preemption are all this.
    """

    __slots__ = (
        "arrived_at",
        "block_hashes",
        "blocked_on",
        "blocks",
        "cache_salt",
        "capacity",
        "computed_len",
        "deadline",
        "decode_cost",
        "hit_tokens",
        "id",
        "is_prefilled",
        "is_suspect",
        "length",
        "max_length",
        "next_publish_length",
        "params",
        "parent",
        "preemptions",
        "prefill_cost",
        "priority_order",
        "prompt_len",
        "row",
        "scheduled_at",
        "stale_until_step",
        "stop_token_ids",
        "tenant_counter",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        *,
        id: str,  # noqa: A002 - the field's name
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        stop_token_ids: frozenset[int],
        cache_domain: str,
        tier: int,
        tenant_counter: TenantCounter,
        arrived_at: float,
        deadline: float,
        parent: Sequence | None,
    ) -> None:
        self.id = id
        self.tokens = prompt + output
        self.prompt_len = len(prompt)
        self.params = params
        self.stop_token_ids = stop_token_ids
        self.cache_salt = hashlib.sha256(cache_domain.encode()).digest()
        self.tier = tier
        self.tenant_counter = tenant_counter
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.parent = parent
        self.max_length = len(prompt) + params.max_tokens
        self.prefill_cost = INPUT_TOKEN_WEIGHT / tenant_counter.weight
        self.decode_cost = OUTPUT_TOKEN_WEIGHT / tenant_counter.weight
        self.length = len(self.tokens)
        """Tokens known or being sampled right now."""
        self.computed_len = 0
        """Tokens whose KV exists, or will once the steps in flight are done."""
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that `blocks` can hold."""
        self.block_hashes: list[bytes] = []
        self.next_publish_length = 0
        """The next block is full once this many tokens are computed."""
        self.row = -1
        """Permanent row while running, else -1."""
        self.priority_order = (tier, NEVER)
        """(tier, admission number): running sequences in order of importance."""
        self.hit_tokens = 0
        self.scheduled_at: float | None = None
        self.is_prefilled = False
        """It has been given a token since it joined the batch, so all before that is computed."""
        self.preemptions = 0
        self.is_suspect = False
        """It was part of a step that failed: it runs alone until it has shown itself innocent."""
        self.blocked_on: Sequence | bytes | None = None
        """The lead, or the key of the block, that it is held for."""
        self.stale_until_step = -1
        """Results of steps up to this one no longer concern it."""

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Identity of the full block `index`: sha256 over the chain of tokens before it and the domain's salt."""
        hashes = self.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.cache_salt
            ids = array("i", self.tokens[start : start + block_size])
            hashes.append(hashlib.sha256(parent + ids.tobytes()).digest())
        return hashes[index]

    @property
    def output_len(self) -> int:
        """Output tokens so far, those of a resumed request included."""
        return len(self.tokens) - self.prompt_len
