"""What the host packs is what the device gathers: batches against a plain model of the rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.execution.array_packing import ARRAY_ALIGNMENT_BYTES, pack_arrays, unpack_arrays
from argosy.engine.execution.persistent_batch import DeviceInputs, PackedStep, PersistentBatch
from argosy.engine.scheduling import AdmittedSequence, StepPlan
from argosy.protocol import SamplingParams

ROWS, LENGTH, BLOCK = 5, 40, 4
lists = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


@given(st.lists(lists, max_size=5).filter(any), st.lists(lists, max_size=5))
def test_arrays_come_out_as_they_went_in(longs: list[list[int]], ints: list[list[int]]) -> None:
    buffer, layout = pack_arrays(
        [np.array(part, dtype=np.int64) for part in longs],
        [np.array(part, dtype=np.int64) for part in ints],
    )
    wide, narrow = unpack_arrays(torch.from_numpy(buffer), layout)
    assert [part.tolist() for part in wide] == longs
    assert [part.tolist() for part in narrow] == ints
    assert all(part.dtype == torch.int64 for part in wide)
    assert all(part.dtype == torch.int32 for part in narrow)
    offsets = [part.storage_offset() * part.itemsize for part in [*wide, *narrow] if len(part)]
    assert all(offset % ARRAY_ALIGNMENT_BYTES == 0 for offset in offsets)


@dataclass
class Model:
    """Rows as lists."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    blocks: dict[int, list[int]] = field(default_factory=dict)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[AdmittedSequence], StepPlan]:
    """Sequences that are admitted, and the chunks of them that are computed."""
    rows = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True))
    admitted, starts, counts, samples = [], [], [], []
    free = iter(draw(st.permutations(range(ROWS * LENGTH // BLOCK))))
    for row in rows:
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=LENGTH - 1))
        blocks = [next(free) for _ in range(-(-len(tokens) // BLOCK))]
        admitted.append(AdmittedSequence(row, tokens, len(tokens), SamplingParams(), blocks))
        starts.append(draw(st.integers(0, len(tokens) - 1)))
        counts.append(draw(st.integers(1, len(tokens) - starts[-1])))
        samples.append(starts[-1] + counts[-1] == len(tokens))
    return admitted, StepPlan(1, rows=rows, starts=starts, counts=counts, sample_flags=samples)


def filled(admitted: list[AdmittedSequence]) -> tuple[PersistentBatch, Model]:
    table = PersistentBatch(ROWS, LENGTH, BLOCK, torch.device("cpu"))
    model = Model()
    for admission in admitted:
        table.admit(admission)
        model.tokens[admission.row] = list(admission.tokens)
        model.blocks[admission.row] = list(admission.blocks)
    return table, model


def check(table: PersistentBatch, packed: PackedStep, plan: StepPlan, model: Model) -> None:
    """The batch is what the model says, and ends with padding that harms nobody."""
    batch = table.gather_batch(DeviceInputs(packed.buffer, packed.shape))
    flat = [
        (chunk, row, position)
        for chunk, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        )
        for position in range(start, start + count)
    ]
    total, used = len(flat), len(plan.rows)
    assert batch.token_ids[:total].tolist() == [model.tokens[row][at] for _, row, at in flat]
    assert batch.positions[:total].tolist() == [at for _, _, at in flat]
    slots = [model.blocks[row][at // BLOCK] * BLOCK + at % BLOCK for _, row, at in flat]
    assert batch.slot_mapping[:total].tolist() == slots
    assert bool((batch.slot_mapping[total:] < 0).all())
    ends = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
    assert batch.seq_lens[:used].tolist() == ends
    assert not batch.seq_lens[used:].any()
    assert batch.query_start_loc[: used + 1].tolist() == [0, *np.cumsum(plan.counts)]
    assert batch.rows[:used].tolist() == plan.rows
    for pages, row, end in zip(batch.block_table, plan.rows, ends, strict=False):
        held = -(-end // BLOCK)
        assert pages[:held].tolist() == model.blocks[row][:held]
    sampled = [chunk for chunk, samples in enumerate(plan.sample_flags) if samples]
    assert packed.sample_rows.tolist() == [plan.rows[chunk] for chunk in sampled]
    assert packed.sample_positions.tolist() == [ends[chunk] for chunk in sampled]
    last = [int(batch.query_start_loc[chunk + 1]) - 1 for chunk in sampled]
    assert set(last) <= set(batch.logit_index.tolist())
    wanted = packed.logit_index.tolist()
    assert batch.logit_index[: len(wanted)].tolist() == wanted


@given(steps(), st.data())
def test_a_batch_holds_the_chunks_of_its_plan(
    step: tuple[list[AdmittedSequence], StepPlan], data: st.DataObject
) -> None:
    admitted, plan = step
    table, model = filled(admitted)
    some = data.draw(st.none() | st.lists(st.integers(0, plan.total_tokens - 1), min_size=1))
    wanted = None if some is None else np.array(sorted(set(some)))
    packed = table.pack_step(plan, wanted)
    check(table, packed, plan, model)
    assert sorted({*packed.sample_index.tolist(), *(some or [])}) == packed.logit_index.tolist()


@given(steps(), st.data())
def test_decodes_are_the_same_padded_and_see_sampled_tokens_and_new_blocks(
    step: tuple[list[AdmittedSequence], StepPlan], data: st.DataObject
) -> None:
    admitted, _ = step
    table, model = filled(admitted)
    rows = sorted(model.tokens)
    ends, every = [len(model.tokens[row]) for row in rows], [True] * len(rows)
    prefill = StepPlan(1, rows=rows, starts=[0] * len(rows), counts=ends, sample_flags=every)
    assert not table.is_uniform_decode(StepPlan(0)), "the device has not been told of the tokens"
    packed = table.pack_step(prefill)
    inputs = DeviceInputs(packed.buffer, packed.shape)
    table.gather_batch(inputs)
    assert table.is_uniform_decode(StepPlan(0))
    drawn = data.draw(st.lists(st.integers(0, 99), min_size=len(rows), max_size=len(rows)))
    table.append_tokens(inputs, torch.tensor(drawn))
    placed = []
    for row, end, token in zip(rows, ends, drawn, strict=True):
        model.tokens[row].append(token)
        if end % BLOCK == 0:
            model.blocks[row].append(1000 + row)
            placed.append((row, end // BLOCK, 1000 + row))
    table.append_blocks(placed)
    plan = StepPlan(2, rows=rows, starts=ends, counts=[1] * len(rows), sample_flags=every)
    size = data.draw(st.integers(len(rows), ROWS))
    if table.is_uniform_decode(plan) and data.draw(st.booleans()):
        packed = table.pack_padded_step(plan, size)
        empty = table.pack_padded_step(StepPlan(0), size)
        assert packed.shape == empty.shape, "one recording serves all steps of a size"
    else:
        packed = table.pack_step(plan)
    check(table, packed, plan, model)
    assert packed.sample_index.tolist() == list(range(len(rows)))
