"""State of the unfinished sequences: their tokens, those that have KV, their blocks, and what they wait for."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import deque
from collections.abc import Iterator

from argosy.engine.engine_request import EngineRequest
from argosy.policy import INPUT_TOKEN_WEIGHT, OUTPUT_TOKEN_WEIGHT, TenantCounter

NEVER = 1 << 62


class SequenceGroup:
    """Unfinished sequences of one request: its choices, the prompts of a batch, or the inputs to pool."""

    __slots__ = ("key", "num_running", "num_unfinished", "waiting")

    def __init__(self, key: tuple[str, int, str]) -> None:
        self.key = key
        self.num_unfinished = 0
        self.num_running = 0
        self.waiting: deque[Sequence] = deque()
        """Sequences in the queue, where only the first of them has a position."""


class Sequence:
    """State of one choice of a request. Only the scheduler changes it.

    A step computes some of the tokens `computed_len .. length`. When it reaches `length`, it samples one more token,
    and `length` grows by 1. This covers prefill, decode, prefix hits, resume, and recomputation after preemption. A
    step that reaches `length` may also compute drafts. Each one that equals the sampled token adds 1 to both.
    """

    __slots__ = (
        "adapter_slot",
        "arrived_at",
        "block_hashes",
        "block_tables",
        "blocked_on",
        "cache_salt",
        "can_draft",
        "capacity",
        "computed_len",
        "deadline",
        "decode_cost",
        "first_blocks",
        "group",
        "hit_tokens",
        "id",
        "is_prefilled",
        "is_suspect",
        "length",
        "max_length",
        "next_full_length",
        "params",
        "parent",
        "pooling",
        "prediction",
        "preemptions",
        "prefill_cost",
        "priority_order",
        "prompt_len",
        "row",
        "scheduled_at",
        "shares_outputs",
        "stale_until_step",
        "stop_token_ids",
        "tenant_counter",
        "tier",
        "tokens",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        stop_token_ids: frozenset[int],
        tenant_counter: TenantCounter,
        arrived_at: float,
        deadline: float,
        parent: Sequence | None,
        group: SequenceGroup | None = None,
        adapter_slot: int = 0,
    ) -> None:
        self.id = request.id
        self.tokens = request.prompt + request.resumed_tokens
        self.prompt_len = len(request.prompt)
        self.params = request.params
        self.pooling = request.pooling
        self.prediction = request.prediction
        self.shares_outputs = request.shares_outputs
        self.stop_token_ids = stop_token_ids
        self.adapter_slot = adapter_slot
        """Slot of its adapter in the executor. 0 is the model alone."""
        self.cache_salt = _cache_salt(request)
        self.tier = request.tier
        self.tenant_counter = tenant_counter
        self.arrived_at = arrived_at
        self.deadline = deadline
        self.parent = parent
        self.group = group
        """Group of the sequences of its request. None if it is the only one."""
        self.max_length = self.prompt_len + request.max_tokens
        self.prefill_cost = INPUT_TOKEN_WEIGHT / tenant_counter.weight
        self.decode_cost = OUTPUT_TOKEN_WEIGHT / tenant_counter.weight
        self.length = len(self.tokens)
        """Number of tokens that are known or being sampled now."""
        self.computed_len = 0
        """Number of tokens that have KV once the steps in flight are done."""
        self.block_tables: list[list[int]] = []
        """Blocks in order for each KV cache group. Empty while the sequence does not run."""
        self.first_blocks: list[int] = []
        """Number of blocks at the start of each table that have left the group's window, so that it has none there."""
        self.capacity = 0
        """Number of tokens for which all tables have blocks."""
        self.block_hashes: list[bytes] = []
        self.next_full_length = 0
        """Number of computed tokens at which the next block is full, so that the KV cache publishes or releases it."""
        self.row = -1
        """Row in the persistent batch while running, else -1."""
        self.priority_order = (request.tier, NEVER)
        """(tier, number of its first admission), by which running sequences are sorted, most important first."""
        self.hit_tokens = 0
        self.scheduled_at: float | None = None
        self.is_prefilled = False
        """Whether a token was sampled since the sequence joined the batch, so all earlier tokens are computed."""
        self.preemptions = 0
        self.is_suspect = False
        """Whether the sequence was part of a failed step. A suspect runs alone until it has produced a token."""
        self.can_draft = request.speculation
        """Whether steps may compute drafts. False after a step with drafts that failed or gave no token."""
        self.blocked_on: Sequence | bytes | None = None
        """Lead, or key of the pending block, that the sequence waits for."""
        self.stale_until_step = -1
        """Number of the last step whose results the sequence ignores."""

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Return the key of the full block `index`.

        The key is the SHA-256 hash of the block's tokens and the previous block's key, or `cache_salt`.
        """
        hashes = self.block_hashes
        if len(hashes) <= index:
            start = len(hashes) * block_size
            ids = array("i", self.tokens[start : (index + 1) * block_size])
            data, size = ids.tobytes(), ids.itemsize * block_size
            parent = hashes[-1] if hashes else self.cache_salt
            for at in range(0, len(data), size):
                parent = hashlib.sha256(parent + data[at : at + size]).digest()
                hashes.append(parent)
        return hashes[index]

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether all tokens of the prompt must be computed, because their results are part of the output."""
        reads_all = self.pooling is not None and self.pooling.reads_all_tokens
        return reads_all or self.params.prompt_logprobs is not None

    @property
    def output_len(self) -> int:
        """Number of output tokens so far, including those that a resumed request started with."""
        return len(self.tokens) - self.prompt_len


def _cache_salt(request: EngineRequest) -> bytes:
    """Return the key before the first block: that of the cache domain and, by its content, of the adapter."""
    domain = request.cache_domain
    if request.adapter is not None:
        domain += f"\0{request.adapter.digest}"  # no domain has a NUL, which no header can carry
    return hashlib.sha256(domain.encode()).digest()


class RequestRegistry:
    """Registry of all unfinished requests, whether they run, wait or are blocked.

    A sibling is blocked until its lead's prompt is computed, because the sibling then shares the lead's blocks. A
    request is also blocked while another sequence computes its prefix.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._blocked: dict[Sequence | bytes, list[Sequence]] = {}
        """Lead or block key -> sequences that wait for it."""
        self._deadlines: list[tuple[float, str]] = []
        self._groups: dict[tuple[str, int, str], SequenceGroup] = {}
        """Tenant, tier and group id -> group. Callers choose ids, so equal ids of two tenants are two groups."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def get(self, request_id: str | None) -> Sequence | None:
        """Return the unfinished request with this id, or None."""
        return None if request_id is None else self._by_id.get(request_id)

    def find_group(self, request: EngineRequest) -> SequenceGroup | None:
        """Return the group of a new request, which is created for its first sequence. None if it is a single one."""
        if not request.group_id:
            return None
        key = request.tenant, request.tier, request.group_id
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = SequenceGroup(key)
        return group

    def add(self, seq: Sequence) -> bool:
        """Add a request, whose id must not be in use, and return whether it may enter the queue."""
        assert seq.id not in self._by_id, f"request id {seq.id} is in use"
        self._by_id[seq.id] = seq
        if seq.group is not None:
            seq.group.num_unfinished += 1
        if seq.deadline < float("inf"):
            heapq.heappush(self._deadlines, (seq.deadline, seq.id))
        if len(self._deadlines) > 1000 + 4 * len(self._by_id):  # drop deadlines of ended requests
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._by_id]
            heapq.heapify(self._deadlines)
        if seq.parent is None or seq.parent.is_prefilled:
            return True
        self.block(seq, seq.parent)
        return False

    def block(self, seq: Sequence, dependency: Sequence | bytes) -> None:
        """Block a sequence until `unblock` is called for its dependency, a lead or a block key."""
        self._blocked.setdefault(dependency, []).append(seq)
        seq.blocked_on = dependency

    def unblock(self, dependency: Sequence | bytes) -> list[Sequence]:
        """Return and unblock the sequences that wait for `dependency`, which is available or abandoned."""
        released = self._blocked.pop(dependency, [])
        for seq in released:
            seq.blocked_on = None
        return released

    def remove(self, seq: Sequence) -> None:
        """Remove a request that has ended."""
        del self._by_id[seq.id]
        if seq.group is not None:
            seq.group.num_unfinished -= 1
            if not seq.group.num_unfinished:
                del self._groups[seq.group.key]
        if seq.blocked_on is not None:
            self._blocked[seq.blocked_on].remove(seq)
            seq.blocked_on = None

    def pop_expired(self, now: float) -> list[Sequence]:
        """Return the requests whose deadline has passed. Each request is returned once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            seq = self._by_id.get(request_id)
            if seq is not None and seq.deadline <= now:
                expired.append(seq)
        return expired

    @property
    def blocked_requests(self) -> list[Sequence]:
        """Requests that wait for a lead or a block."""
        return [seq for waiting in self._blocked.values() for seq in waiting]
