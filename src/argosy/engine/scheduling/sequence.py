"""One sequence on its way: `tokens` it has, `computed` it has KV for, and the blocks that hold it."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

from argosy.policy import INPUT_PRICE, OUTPUT_PRICE

if TYPE_CHECKING:
    from argosy.policy import Account
    from argosy.protocol import SamplingParams

NEVER = 1 << 62


class Sequence:
    """A request for one sequence, and its state. The scheduler alone changes it.

    One number chases another: a step computes some of `computed .. length`, and when it reaches
    `length` one more token is sampled, so `length` grows. Prefill, decode, prefix hits, resume and
    recomputation after preemption are all this.
    """

    __slots__ = (
        "account",
        "arrival",
        "awaits",
        "blocks",
        "capacity",
        "computed",
        "deadline",
        "decode_price",
        "hashes",
        "hit_tokens",
        "id",
        "lead",
        "length",
        "limit",
        "order",
        "params",
        "preemptions",
        "prefill_price",
        "prefilled",
        "prompt_len",
        "publish_at",
        "row",
        "salt",
        "scheduled_at",
        "stops",
        "suspect",
        "tier",
        "tokens",
        "void",
    )

    def __init__(
        self,
        *,
        id: str,  # noqa: A002 - the field's name
        prompt: list[int],
        output: list[int],
        params: SamplingParams,
        stops: frozenset[int],
        domain: str,
        tier: int,
        account: Account,
        arrival: float,
        deadline: float,
        lead: Sequence | None,
    ) -> None:
        self.id = id
        self.tokens = prompt + output
        self.prompt_len = len(prompt)
        self.params = params
        self.stops = stops
        self.salt = hashlib.sha256(domain.encode()).digest()
        self.tier = tier
        self.account = account
        self.arrival = arrival
        self.deadline = deadline
        self.lead = lead
        self.limit = len(prompt) + params.max_tokens
        self.prefill_price = INPUT_PRICE / account.weight
        self.decode_price = OUTPUT_PRICE / account.weight
        self.length = len(self.tokens)
        """Tokens known or being sampled right now."""
        self.computed = 0
        """Tokens whose KV exists, or will once the steps in flight are done."""
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that `blocks` can hold."""
        self.hashes: list[bytes] = []
        self.publish_at = 0
        """The next block is full once this many tokens are computed."""
        self.row = -1
        """Permanent row while running, else -1."""
        self.order = (tier, NEVER)
        """(tier, admission number): running sequences in order of importance."""
        self.hit_tokens = 0
        self.scheduled_at: float | None = None
        self.prefilled = False
        """It has been given a token since it joined the batch, so all before that is computed."""
        self.preemptions = 0
        self.suspect = False
        """It was part of a step that failed: it runs alone until it has shown itself innocent."""
        self.awaits: Sequence | bytes | None = None
        """The lead, or the key of the block, that it is held for."""
        self.void = -1
        """Results of steps up to this one no longer concern it."""

    def hash_of(self, index: int, block_size: int) -> bytes:
        """Identity of the full block `index`: sha256 over the chain of tokens before it and the domain's salt."""
        hashes = self.hashes
        while len(hashes) <= index:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.salt
            ids = array("i", self.tokens[start : start + block_size])
            hashes.append(hashlib.sha256(parent + ids.tobytes()).digest())
        return hashes[index]

    @property
    def output_len(self) -> int:
        """Output tokens so far, those of a resumed request included."""
        return len(self.tokens) - self.prompt_len
