"""What one step is to do, and what it gave: the only words between scheduler and executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from argosy.protocol import SamplingParams


class AdmittedSequence(NamedTuple):
    """A sequence that takes a row in this step: everything the executor must know of it."""

    row: int
    tokens: list[int]
    """Prompt and output so far."""
    prompt_len: int
    params: SamplingParams
    blocks: list[int]


class BlockRestore(NamedTuple):
    """Fill `block` from host slot `slot` before the step."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: for chunk i, tokens `starts[i] .. starts[i] + counts[i]` of row `rows[i]` are computed.

    The executor applies, in this order: `offloads`, `copies`, `restores`, `admitted`, `placed`; then it computes.
    """

    step: int
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample_flags: list[bool] = field(default_factory=list)
    """Whether chunk i reaches its sequence's last token, so that a token is sampled from it."""
    admissions: list[AdmittedSequence] = field(default_factory=list)
    block_appends: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, index, block): block becomes the row's index-th."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block)."""
    block_offloads: list[tuple[int, int]] = field(default_factory=list)
    """(block, host slot): save the block in host memory, with a checksum."""
    block_restores: list[BlockRestore] = field(default_factory=list)

    @property
    def total_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(self.counts)


class Logprob(NamedTuple):
    """A token's natural-log probability under the unmodified logits, its rank from 1, and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top_logprobs: list[tuple[int, float]]


class StepDurations(NamedTuple):
    """Where an executor's part of a step went, in seconds."""

    launch_s: float = 0.0
    """Blocks moved and inputs built, on the host."""
    compute_s: float = 0.0
    """The model, on the device."""
    sample_s: float = 0.0
    """From logits to tokens, on the device."""


ZERO_DURATIONS = StepDurations()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step gave, by chunk index of its plan."""

    tokens: list[int]
    """The sampled token of each chunk; -1 where none was sampled."""
    logprobs: dict[int, Logprob] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[Logprob]] = field(default_factory=dict)
    """By chunk, for prompt positions start + 1 .. start + count in order: the token at each, as predicted."""
    failures: dict[int, str] = field(default_factory=dict)
    """Chunks whose row gave no valid numbers, and why; only those sequences end."""
    corrupt_blocks: list[int] = field(default_factory=list)
    """Blocks of `restores` whose checksum did not hold; what was computed on them is void."""
    durations: StepDurations = ZERO_DURATIONS
