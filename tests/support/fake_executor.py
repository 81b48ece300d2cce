"""Executor that stores tokens in place of KV and of recurrent states, so that every wrong one is a wrong token.

Never compared with `TorchExecutor`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from argosy.engine.scheduling import StepPlan, StepResult

if TYPE_CHECKING:
    from argosy.engine.scheduling import AdmittedSequence

VOCAB = 50


def next_token(tokens: list[int]) -> int:
    """Return the next token, a function of the whole sequence."""
    digest = hashlib.sha256(bytes(str(tokens), "ascii")).digest()
    return digest[0] % VOCAB


def reference_output(
    prompt: list[int], max_tokens: int, stop_tokens: frozenset[int] = frozenset()
) -> list[int]:
    """Return the tokens of a run without preemption or faults."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_tokens:
            break
    return tokens[len(prompt) :]


@dataclass
class FakeExecutor:
    """Executes step plans and asserts that each token reads only its own sequence's KV and recurrent state."""

    num_blocks: int
    block_size: int
    max_step_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Sliding window of each KV cache group."""
    is_recurrent: bool = False
    """Whether a token reads the recurrent state of its sequence."""
    corrupt_slots: set[int] = field(default_factory=set)
    """Host slots with corrupt content."""
    memory_tokens: int | None = None
    """Number of tokens above which a step runs out of memory before it has any effect. None means never."""
    max_window: int = 1 << 30
    """Largest number of tokens that a chunk with drafts gives, as if no later token could be sampled."""

    def __post_init__(self) -> None:
        self.kv = [[(-1, -1)] * self.block_size for _ in range(self.num_blocks)]
        self.host: dict[int, list[tuple[int, int]]] = {}
        self.rows: dict[int, tuple[list[int], list[list[int]]]] = {}
        self.states: dict[int, list[int]] = {}
        """Row -> tokens of its recurrent state."""
        self.snapshots: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""
        assert plan.total_tokens <= self.max_step_tokens
        if self.memory_tokens is not None and plan.total_tokens > self.memory_tokens:
            raise MemoryError
        assert len(set(plan.rows)) == len(plan.rows), "a row occurs twice in one step"
        for block, slot in plan.block_offloads:
            self.host[slot] = list(self.kv[block])
            self.corrupt_slots.discard(slot)
        for source, destination in plan.block_copies:
            self.kv[destination] = list(self.kv[source])
        corrupt_list = []
        for slot, block in plan.block_restores:
            self.kv[block] = list(self.host[slot])
            if slot in self.corrupt_slots:
                self.kv[block] = [(-7, -7)] * self.block_size
                corrupt_list.append(block)
        for admission in plan.admissions:
            self._admit(admission)
        for snapshot, row in plan.snapshot_loads:
            self.states[row] = self.snapshots[snapshot]
        for row, group, index, block in plan.block_appends:
            assert len(self.rows[row][1][group]) == index
            self.rows[row][1][group].append(block)
        corrupt_blocks = set(corrupt_list)
        tokens, windows = [], {}
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            drafts = plan.draft_tokens.get(chunk, [])
            samples = plan.sample_counts[chunk]
            assert not samples or samples == 1 + len(drafts)
            new_tokens = self._compute(
                row, start, count, drafts, samples=samples > 0, corrupt_blocks=corrupt_blocks
            )
            if drafts:
                windows[chunk] = new_tokens
            tokens.append(new_tokens[0] if samples == 1 else -1)
        for chunk, length, snapshot in plan.snapshot_saves:
            start, count = plan.starts[chunk], plan.counts[chunk]
            assert start < length <= start + count, "a snapshot of tokens outside of the step"
            self.snapshots[snapshot] = self.states[plan.rows[chunk]][:length]
        return StepResult(tokens, windows, corrupt_blocks=corrupt_list)

    def _admit(self, admission: AdmittedSequence) -> None:
        tables = [list(table) for table in admission.block_tables]
        assert len(tables) == len(self.windows)
        self.rows[admission.row] = (list(admission.tokens), tables)

    def _compute(
        self,
        row: int,
        start: int,
        count: int,
        drafts: list[int],
        *,
        samples: bool,
        corrupt_blocks: set[int],
    ) -> list[int]:
        known, tables = self.rows[row]
        tokens = known + drafts
        size = self.block_size
        assert start + count <= len(tokens), "the plan computes an unknown token"
        assert samples == (start + count == len(tokens))
        if start and self.is_recurrent:
            assert self.states[row] == tokens[:start], "a sequence reads the state of another one"
        is_corrupt = any(not corrupt_blocks.isdisjoint(blocks) for blocks in tables)
        self.states[row] = [-7] * (start + count) if is_corrupt else tokens[: start + count]
        for window, blocks in zip(self.windows, tables, strict=True):
            first = 0 if window is None else max(0, start - window + 1)
            if not corrupt_blocks.intersection(blocks):
                for position in range(first, start):
                    stored = self.kv[blocks[position // size]][position % size]
                    assert stored == (position, tokens[position]), (
                        "a sequence reads the KV of another one"
                    )
            for position in range(start, start + count):
                assert blocks[position // size] >= 0
                self.kv[blocks[position // size]][position % size] = (position, tokens[position])
        if not samples:
            return []
        new_tokens: list[int] = []
        while not new_tokens or drafts[: len(new_tokens)] == new_tokens:
            new_tokens.append(next_token(known + new_tokens))
        new_tokens = new_tokens[: self.max_window] if drafts else new_tokens
        known += new_tokens
        return new_tokens
