"""Interface between scheduler and executor, which is the plan of one step and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from argosy.engine.pooling import PoolingParams
from argosy.protocol import SamplingParams

NO_BLOCK = -1
"""Entry of a block table for a block that has left the window. It is never read."""


class AdmittedSequence(NamedTuple):
    """Sequence that joins the batch in this step, with all that the executor needs to compute it."""

    row: int
    tokens: list[int]
    """Prompt and output tokens so far."""
    prompt_len: int
    params: SamplingParams
    block_tables: list[list[int]]
    """Blocks in order for each KV cache group. Those at the start may be `NO_BLOCK`."""
    pooling: PoolingParams | None = None
    """Parameters of a sequence that is pooled to a vector. None for one that is continued."""
    adapter_slot: int = 0
    """Slot of the adapter that computes it. 0 is the model alone."""


class BlockRestore(NamedTuple):
    """Copy of host slot `slot` into `block` before the step."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Plan of one step, which computes tokens `starts[i] .. starts[i] + counts[i]` of row `rows[i]` for each chunk i.

    Before it computes, the executor applies `block_offloads`, `block_copies`, `block_restores`, `admissions`,
    `snapshot_loads` and `block_appends`, in this order.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample_counts: list[int] = field(default_factory=list)
    """Number of last tokens of chunk i after each of which the step samples a token.

    It is 1 if the chunk reaches its sequence's last token, 1 more for each of its drafts, and otherwise 0.
    """
    draft_tokens: dict[int, list[int]] = field(default_factory=dict)
    """Chunk -> drafts, which it computes after its sequence's last token, to verify them."""
    admissions: list[AdmittedSequence] = field(default_factory=list)
    block_appends: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(row, group, index, block), which makes `block` the row's block number `index` in a KV cache group."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block)."""
    block_offloads: list[tuple[int, int]] = field(default_factory=list)
    """(block, host slot), which saves the block in host memory with a checksum."""
    block_restores: list[BlockRestore] = field(default_factory=list)

    snapshot_loads: list[tuple[int, int]] = field(default_factory=list)
    """(snapshot, row), which starts an admitted row from a snapshot of the recurrent state."""
    snapshot_saves: list[tuple[int, int, int]] = field(default_factory=list)
    """(chunk, number of tokens, snapshot), which saves the recurrent state of the chunk's sequence after that number of
    its tokens. The last of them is in the chunk."""

    @property
    def total_tokens(self) -> int:
        """Number of tokens that this step computes."""
        return sum(self.counts)

    @property
    def num_drafts(self) -> int:
        """Number of these tokens that are drafts."""
        return sum(map(len, self.draft_tokens.values()))

    def count_work(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Return what the duration of the step depends on.

        Returns:
            Rows that decode a token or verify a draft, the tokens in the KV cache of their sequences, and for each
            other chunk its tokens and those before it.
        """
        decode_rows, context_tokens, prefill_chunks = 0, 0, []
        for start, count, samples in zip(self.starts, self.counts, self.sample_counts, strict=True):
            if count == samples and start:
                decode_rows, context_tokens = decode_rows + count, context_tokens + start + 1
            else:
                prefill_chunks.append((count, start))
        return decode_rows, context_tokens, prefill_chunks


StepTokens = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class StepRecord(Struct, frozen=True, kw_only=True):
    """Work and duration of a step that an engine has computed, as a line of its step log has them."""

    seconds: Annotated[float, Meta(ge=0, le=86_400)]
    """Time from the end of the step before, or from its own beginning if the engine was idle."""
    ended_at: float = 0.0
    """Time of its end on the machine's monotonic clock, in seconds."""
    decode_rows: Annotated[int, Meta(ge=0, le=1_000_000)]
    """Tokens of sequences that decode, with their drafts."""
    context_tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    """Tokens in the KV cache of these sequences, summed."""
    prefill_chunks: list[tuple[StepTokens, StepTokens]]
    """Tokens of each other chunk, and the tokens of its sequence before it."""


class Logprob(NamedTuple):
    """Natural-log probability of a token under the unmodified logits, its rank from 1, and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


class SequenceFailure(NamedTuple):
    """Reason why a sequence cannot continue, with the error code of the response."""

    message: str
    code: str = "engine_error"


class StepDurations(NamedTuple):
    """Durations of the executor's phases of a step, in seconds."""

    launch_s: float = 0.0
    """Time on the host to move blocks and build inputs."""
    compute_s: float = 0.0
    """Time on the device to run the model."""
    sample_s: float = 0.0
    """Time on the device to sample tokens from logits."""
    mask_fill_s: float = 0.0
    """Time of a host thread to fill the masks of constrained rows, while the device computes."""
    mask_wait_s: float = 0.0
    """Time for which sampling waited for these masks."""


ZERO_DURATIONS = StepDurations()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step, by chunk index of its plan."""

    tokens: list[int]
    """Sampled token of each chunk without drafts, or -1 where none was sampled."""
    windows: dict[int, list[int]] = field(default_factory=dict)
    """Chunk with drafts -> its new tokens: the drafts that equal the sampled tokens, and the token after them.

    A token that cannot be sampled, for example from logits that are not finite, ends the window before it. The window
    may then be empty.
    """
    logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    """Chunk -> log-probability of each new token."""
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    """Chunk -> log-probabilities of the prompt tokens at positions start + 1 .. start + count, in order."""
    failures: dict[int, SequenceFailure] = field(default_factory=dict)
    """Chunk -> failure, for chunks without drafts, finite logits or allowed token. Only their sequences end."""
    corrupt_blocks: list[int] = field(default_factory=list)
    """Blocks of `block_restores` with a wrong checksum. Results computed on them are invalid."""
    durations: StepDurations = ZERO_DURATIONS
    masked_rows: int = 0
    """Number of tokens that were sampled under a mask."""
    pooled: dict[int, bytes] = field(default_factory=dict)
    """Chunk -> vector of its sequence, as bytes of float32."""
