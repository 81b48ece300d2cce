"""Persistent batch: the gathered device batch equals a simple model of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.execution.executor.persistent_batch import (
    ARRAY_ALIGNMENT_BYTES,
    PackedStep,
    PersistentBatch,
    pack_arrays,
    unpack_arrays,
)
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import SamplingParams

ROWS, LENGTH, BLOCK, GROUPS = 5, 40, 4, 2
lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


@given(st.lists(lists, max_size=5).filter(any), st.lists(lists, max_size=5))
def test_unpacked_arrays_equal_packed_arrays(longs: list[list[int]], ints: list[list[int]]) -> None:
    buffer, layout = pack_arrays(
        [np.array(part, dtype=np.int64) for part in longs],
        [np.array(part, dtype=np.int64) for part in ints],
    )
    int64_arrays, int32_arrays = unpack_arrays(torch.from_numpy(buffer), layout)
    assert [part.tolist() for part in int64_arrays] == longs
    assert [part.tolist() for part in int32_arrays] == ints
    assert all(part.dtype == torch.int64 for part in int64_arrays)
    assert all(part.dtype == torch.int32 for part in int32_arrays)
    arrays = [part for part in [*int64_arrays, *int32_arrays] if len(part)]
    offsets = [part.storage_offset() * part.itemsize for part in arrays]
    assert all(offset % ARRAY_ALIGNMENT_BYTES == 0 for offset in offsets)


@dataclass
class RowModel:
    """Tokens and blocks of each row, as lists."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    block_tables: dict[int, list[list[int]]] = field(default_factory=dict)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[AdmittedSequence], StepPlan]:
    """Draw admitted sequences, and a plan that computes chunks of them, some with drafts."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True))
    admitted = []
    plan = StepPlan(1, rows=rows)
    free = iter(draw(st.permutations(range(GROUPS * ROWS * LENGTH // BLOCK))))
    for chunk, row in enumerate(rows):
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=LENGTH - 1))
        drafts = draw(st.lists(st.integers(0, 99), max_size=LENGTH - len(tokens)))
        blocks = -(-(len(tokens) + len(drafts)) // BLOCK)
        tables = [[next(free) for _ in range(blocks)] for _ in range(GROUPS)]
        admitted.append(AdmittedSequence(row, tokens, len(tokens), SamplingParams(), tables))
        start = draw(st.integers(0, len(tokens) - 1))
        count = draw(st.integers(1, len(tokens) - start))
        samples = int(start + count == len(tokens))
        if samples and drafts:
            plan.draft_tokens[chunk] = drafts
            count, samples = count + len(drafts), samples + len(drafts)
        plan.starts.append(start)
        plan.counts.append(count)
        plan.sample_counts.append(samples)
    return admitted, plan


def admit_all(admitted: list[AdmittedSequence]) -> tuple[PersistentBatch, RowModel]:
    table = PersistentBatch(ROWS, LENGTH, BLOCK, GROUPS, torch.device("cpu"))
    model = RowModel()
    for admission in admitted:
        table.admit(admission)
        model.tokens[admission.row] = list(admission.tokens)
        model.block_tables[admission.row] = [list(blocks) for blocks in admission.block_tables]
    return table, model


def assert_batch_matches_model(
    table: PersistentBatch, packed: PackedStep, plan: StepPlan, model: RowModel
) -> None:
    """Check that the batch equals the model, and that its padding has no effect."""
    batch, _ = table.gather_batch(packed.buffer, packed.shape)
    flat = [
        (chunk, row, position)
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        )
        for position in range(start, start + count)
    ]
    total, used = len(flat), len(plan.rows)
    known = [
        model.tokens[row] + plan.draft_tokens.get(chunk, []) for chunk, row in enumerate(plan.rows)
    ]
    assert batch.token_ids[:total].tolist() == [
        known[chunk][position] for chunk, _, position in flat
    ]
    assert batch.positions[:total].tolist() == [position for _, _, position in flat]
    for group, slots in enumerate(batch.slot_mappings):
        assert slots[:total].tolist() == [
            model.block_tables[row][group][position // BLOCK] * BLOCK + position % BLOCK
            for _, row, position in flat
        ]
        assert bool((slots[total:] < 0).all())
    ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
    assert batch.seq_lens[:used].tolist() == ends
    assert not batch.seq_lens[used:].any()
    assert batch.query_start_loc[: used + 1].tolist() == [0, *np.cumsum(plan.counts)]
    assert batch.rows[:used].tolist() == plan.rows
    for group, blocks_of_group in enumerate(batch.block_tables):
        for blocks, row, end in zip(blocks_of_group, plan.rows, ends, strict=False):
            count = -(-end // BLOCK)
            assert blocks[:count].tolist() == model.block_tables[row][group][:count]
    sampled = [
        (row, end - offset, flat_end - offset - 1)
        for row, end, flat_end, samples in zip(
            plan.rows, ends, np.cumsum(plan.counts), plan.sample_counts, strict=True
        )
        for offset in reversed(range(samples))
    ]
    assert packed.sample_rows.tolist() == [row for row, _, _ in sampled]
    assert packed.sample_positions.tolist() == [position for _, position, _ in sampled]
    assert packed.sample_index.tolist() == [flat for _, _, flat in sampled]
    assert set(packed.sample_index.tolist()) <= set(batch.logit_index.tolist())
    wanted = packed.logit_index.tolist()
    assert batch.logit_index[: len(wanted)].tolist() == wanted


@given(steps(), st.data())
def test_batch_contains_chunks_of_plan(
    step: tuple[list[AdmittedSequence], StepPlan], data: st.DataObject
) -> None:
    admitted, plan = step
    table, model = admit_all(admitted)
    positions = data.draw(st.none() | st.lists(st.integers(0, plan.total_tokens - 1), min_size=1))
    logit_positions = None if positions is None else np.array(sorted(set(positions)))
    packed = table.pack_step(plan, logit_positions)
    assert_batch_matches_model(table, packed, plan, model)
    assert (
        sorted({*packed.sample_index.tolist(), *(positions or [])}) == packed.logit_index.tolist()
    )


@given(steps(), st.data())
def test_padded_decode_contains_sampled_tokens_and_new_blocks(
    step: tuple[list[AdmittedSequence], StepPlan], data: st.DataObject
) -> None:
    admitted, _ = step
    table, model = admit_all(admitted)
    rows = sorted(model.tokens)
    ends, all_sampled = [len(model.tokens[row]) for row in rows], [1] * len(rows)
    prefill = StepPlan(1, rows=rows, starts=[0] * len(rows), counts=ends, sample_counts=all_sampled)
    assert not table.is_uniform_decode(StepPlan(0)), "the device does not have the tokens yet"
    packed = table.pack_step(prefill)
    _, sample_index = table.gather_batch(packed.buffer, packed.shape)
    assert table.is_uniform_decode(StepPlan(0))
    sampled = data.draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows)))
    table.append_tokens(sample_index, torch.tensor(sampled))
    new_blocks = []
    for row, end, token in zip(rows, ends, sampled, strict=True):
        model.tokens[row].append(token)
        if end == BLOCK * len(model.block_tables[row][0]):
            for group in range(GROUPS):
                model.block_tables[row][group].append(1000 * group + row)
                new_blocks.append((row, group, end // BLOCK, 1000 * group + row))
    table.append_blocks(new_blocks)
    plan = StepPlan(2, rows=rows, starts=ends, counts=[1] * len(rows), sample_counts=all_sampled)
    size = data.draw(st.integers(len(rows), ROWS))
    if table.is_uniform_decode(plan) and data.draw(st.booleans()):
        packed = table.pack_padded_step(plan, size)
        empty = table.pack_padded_step(StepPlan(0), size)
        assert packed.shape == empty.shape, "one captured graph serves all steps of a size"
    else:
        packed = table.pack_step(plan)
    assert_batch_matches_model(table, packed, plan, model)
    assert packed.sample_index.tolist() == list(range(len(rows)))
