"""Gated delta rule (Yang et al. 2024) on the GPU, in two kernels without a wait for the device.

The convolution needs only the inputs of a chunk and the last ones before it, so its tokens are computed in parallel.
The recurrence runs token by token in float32. A program keeps some columns of a head's matrix in registers, and reads
and writes them in the state of its sequence. A result therefore depends only on the tokens of its own sequence, bit for
bit, however they are divided into chunks. The kernels are compiled without fused multiply-adds other than written ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from argosy.engine.execution.architectures.decoder import DeltaNetArchitecture
from argosy.engine.execution.kernels.batch import Batch, BatchStates
from argosy.engine.execution.kernels.operations import DeltaRuleWeights
from argosy.engine.execution.kernels.torch.operations import MAX_SOFTPLUS_INPUT, NORM_EPS

CONV_TILE_TOKENS = 8
"""Number of tokens of a head that a program of the convolution computes at a time."""
COLUMNS = 8
"""Number of columns of a matrix in one program of the recurrence, 32 bytes of each row.

Its one warp adds without barriers. A layer of Qwen3-Next has 512 programs for each sequence."""


class TritonDeltaRule:
    """Gated delta rule of one layer.

    Captured graphs may have unused rows. A sequence with length 0 has no state, and its result is zero.
    """

    def __init__(self, architecture: DeltaNetArchitecture, weights: DeltaRuleWeights) -> None:
        self._architecture = architecture
        self._weights = weights
        self._constants = delta_rule_constants(architecture)

    def __call__(
        self, qkv: Tensor, factors: Tensor, states: BatchStates, layer: int, batch: Batch
    ) -> Tensor:
        net = self._architecture
        tokens, sequences, device = len(qkv), len(batch.rows), qkv.device
        out = torch.empty(tokens, net.value_heads, net.value_dim, dtype=qkv.dtype, device=device)
        if not tokens:
            return out
        if qkv.stride(1) != 1:
            qkv = qkv.contiguous()
        mixed = torch.empty(tokens, net.channels, dtype=torch.float32, device=device)
        gates = torch.empty(tokens, 2 * net.value_heads, dtype=torch.float32, device=device)
        table = states.table.narrow(1, layer * states.layer_size, states.layer_size)
        chunks = batch.rows, batch.positions, batch.query_start_loc, batch.seq_lens
        strides = qkv.stride(0), table.stride(0)
        heads = 2 * net.key_heads + net.value_heads
        tiles = triton.cdiv(triton.cdiv(tokens, CONV_TILE_TOKENS), sequences)  # of a mean sequence
        _convolve[(sequences, heads, tiles)](
            qkv,
            factors.contiguous(),
            self._weights.conv,
            self._weights.decay_rate,
            self._weights.decay_bias,
            table,
            mixed,
            gates,
            *chunks,
            *strides,
            **self._constants,
            TOKENS=CONV_TILE_TOKENS,
            SIZE=triton.next_power_of_2(max(net.key_dim, net.value_dim)),
            MAX_SOFTPLUS_INPUT=MAX_SOFTPLUS_INPUT,
            EPS=NORM_EPS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        parts = triton.cdiv(net.value_dim, COLUMNS)
        _run_recurrence[(sequences, net.value_heads, parts)](
            qkv,
            mixed,
            gates,
            table,
            out,
            *chunks,
            batch.positions if states.save_slots is None else states.save_slots,
            *strides,
            **self._constants,
            ROWS=triton.next_power_of_2(net.key_dim),
            COLUMNS=COLUMNS,
            PARTS=parts,
            INPUTS=triton.next_power_of_2(triton.cdiv(net.channels, net.value_heads * parts)),
            SAVES=states.save_slots is not None,
            num_warps=1,
            enable_fp_fusion=False,
        )
        return out


def delta_rule_constants(net: DeltaNetArchitecture) -> dict[str, int]:
    """Return the constants that both kernels have."""
    return {
        "KEY_HEADS": net.key_heads,
        "VALUE_HEADS": net.value_heads,
        "KEY_DIM": net.key_dim,
        "VALUE_DIM": net.value_dim,
        "WIDTH": net.conv_width,
    }


@triton.jit
def _convolve(
    qkv,
    factors,
    conv,
    decay_rate,
    decay_bias,
    states,
    mixed,
    gates,
    rows,
    positions,
    query_start_loc,
    seq_lens,
    qkv_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    MAX_SOFTPLUS_INPUT: tl.constexpr,
    EPS: tl.constexpr,
):
    """Convolve a head of a sequence's queries, keys or values, apply SiLU, and normalize queries and keys.

    The programs of values also compute the factor of each update, and the decay. Tiles of TOKENS tokens are shared
    among num_programs(2) programs.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    if tl.load(seq_lens + sequence) == 0:
        return
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    start = tl.load(query_start_loc + sequence)
    stop = tl.load(query_start_loc + sequence + 1)
    is_continued = tl.load(positions + start) > 0
    slot = tl.load(rows + sequence)
    inputs = states + slot * state_stride + VALUE_HEADS * KEY_DIM * VALUE_DIM
    is_value = head >= 2 * KEY_HEADS
    value_head = tl.maximum(head - 2 * KEY_HEADS, 0)
    first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + value_head * VALUE_DIM, head * KEY_DIM)
    col = tl.arange(0, SIZE)
    is_col = col < tl.where(is_value, VALUE_DIM, KEY_DIM)
    channel = first + col
    rate = tl.load(decay_rate + value_head)
    bias = tl.load(decay_bias + value_head)
    for tile in range(start + tl.program_id(2) * TOKENS, stop, tl.num_programs(2) * TOKENS):
        token = (tile + tl.arange(0, TOKENS)).to(tl.int64)
        is_token = token < stop
        mask = is_token[:, None] & is_col[None, :]
        total = tl.zeros((TOKENS, SIZE), tl.float32)
        for i in tl.static_range(WIDTH):
            values = _load_inputs(
                qkv, inputs, token - (WIDTH - 1) + i, channel, mask, start, is_continued, qkv_stride,
                WIDTH, channels,
            )  # fmt: skip
            weight = tl.load(conv + i * channels + channel, mask=is_col, other=0.0)
            total = tl.fma(values, tl.broadcast_to(weight[None, :], total.shape), total)
        active = total / (1.0 + tl.exp(-total))
        length = tl.sqrt_rn(tl.sum(active * active, axis=1) + EPS)
        scale = tl.where(head < KEY_HEADS, KEY_DIM**-0.5, 1.0) / length
        active *= tl.where(is_value, 1.0, scale)[:, None]
        tl.store(mixed + token[:, None] * channels + channel[None, :], active, mask=mask)

        gate = token * 2 * VALUE_HEADS + value_head
        is_gate = is_token & is_value
        update = tl.load(factors + gate, mask=is_gate, other=0.0).to(tl.float32)
        tl.store(gates + gate, 1.0 / (1.0 + tl.exp(-update)), mask=is_gate)
        decay = tl.load(factors + gate + VALUE_HEADS, mask=is_gate, other=0.0).to(tl.float32) + bias
        # log1p(x) is log(1 + x), corrected for the rounding of the sum.
        power = tl.exp(tl.minimum(decay, MAX_SOFTPLUS_INPUT, propagate_nan=tl.PropagateNan.ALL))
        added = 1.0 + power
        difference = added - 1.0
        is_tiny = difference == 0.0
        log1p = tl.log(added) * (power / tl.where(is_tiny, 1.0, difference))
        softplus = tl.where(is_tiny, power, log1p)
        softplus = tl.where(decay > MAX_SOFTPLUS_INPUT, decay, softplus)
        tl.store(gates + gate + VALUE_HEADS, tl.exp(rate * softplus), mask=is_gate)


@triton.jit
def _run_recurrence(
    qkv,
    mixed,
    gates,
    states,
    out,
    rows,
    positions,
    query_start_loc,
    seq_lens,
    save_slots,
    qkv_stride,
    state_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SAVES: tl.constexpr,
):
    """Update COLUMNS columns of a head's matrix by all tokens of a sequence, and read them after each token.

    The program also writes its INPUTS channels of the inputs that the next convolution reads.
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    start = tl.load(query_start_loc + sequence)
    stop = tl.load(query_start_loc + sequence + 1)
    is_continued = tl.load(positions + start) > 0
    row = tl.arange(0, ROWS)
    col = part * COLUMNS + tl.arange(0, COLUMNS)
    is_row = row < KEY_DIM
    is_col = col < VALUE_DIM
    if tl.load(seq_lens + sequence) == 0:
        offset = (start.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + col
        tl.store(out + offset, tl.zeros((COLUMNS,), out.dtype.element_ty), mask=is_col)
        return
    mask = is_row[:, None] & is_col[None, :]
    cells = head * KEY_DIM * VALUE_DIM + row[:, None] * VALUE_DIM + col[None, :]
    own = states + tl.load(rows + sequence) * state_stride
    matrix = tl.load(own + cells, mask=mask & is_continued, other=0.0)
    query_col = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + row
    value_col = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + col
    query, key, value, update, decay = _load_token(
        mixed, gates, start, stop, head, query_col, value_col, is_row, is_col,
        KEY_HEADS, VALUE_HEADS, KEY_DIM, channels,
    )  # fmt: skip
    for index in range(stop - start):
        token = start + index
        # The next token is loaded before this one is computed, so that the loads are done when it starts.
        following = _load_token(
            mixed, gates, token + 1, stop, head, query_col, value_col, is_row, is_col,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, channels,
        )  # fmt: skip
        matrix *= decay
        known = tl.sum(matrix * key[:, None], axis=0)
        delta = (value - known) * update
        rows_of_delta = tl.broadcast_to(delta[None, :], matrix.shape)
        matrix = tl.fma(tl.broadcast_to(key[:, None], matrix.shape), rows_of_delta, matrix)
        result = tl.sum(matrix * query[:, None], axis=0)
        offset = (token.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + col
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=is_col)
        if SAVES:
            slot = tl.load(save_slots + token)
            if slot >= 0:
                saved = states + slot * state_stride
                tl.store(saved + cells, matrix, mask=mask)
                _store_inputs(
                    qkv, own, saved, token + 1, start, is_continued, qkv_stride, head * PARTS + part,
                    VALUE_HEADS * KEY_DIM * VALUE_DIM, WIDTH, channels, INPUTS,
                )  # fmt: skip
        query, key, value, update, decay = following
    tl.store(own + cells, matrix, mask=mask)
    _store_inputs(
        qkv, own, own, stop, start, is_continued, qkv_stride, head * PARTS + part,
        VALUE_HEADS * KEY_DIM * VALUE_DIM, WIDTH, channels, INPUTS,
    )  # fmt: skip


@triton.jit
def _load_token(
    mixed,
    gates,
    token,
    stop,
    head,
    query_col,
    value_col,
    is_row,
    is_col,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Load a token's query, key, columns of its value, factor of the update, and decay. They are 0 after the end."""
    is_token = token < stop
    heads = mixed + token.to(tl.int64) * CHANNELS
    query = tl.load(heads + query_col, mask=is_row & is_token, other=0.0)
    key = tl.load(heads + KEY_HEADS * KEY_DIM + query_col, mask=is_row & is_token, other=0.0)
    value = tl.load(heads + value_col, mask=is_col & is_token, other=0.0)
    gate = gates + token.to(tl.int64) * 2 * VALUE_HEADS + head
    update = tl.load(gate, mask=is_token, other=0.0)
    decay = tl.load(gate + VALUE_HEADS, mask=is_token, other=0.0)
    return query, key, value, update, decay


@triton.jit
def _load_inputs(
    qkv,
    inputs,
    token,
    channel,
    mask,
    start,
    is_continued,
    qkv_stride,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Load channels of flat tokens, of which up to WIDTH - 1 may be before the chunk, as float32."""
    is_new = (token >= start)[:, None]
    offset = token[:, None] * qkv_stride + channel[None, :]
    new = tl.load(qkv + offset, mask=mask & is_new, other=0.0).to(tl.float32)
    offset = (token - start + WIDTH - 1)[:, None] * CHANNELS + channel[None, :]
    # Zeros precede a sequence's first token.
    old = tl.load(inputs + offset, mask=mask & (is_new == 0) & is_continued, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def _store_inputs(
    qkv,
    own,
    to,
    end,
    start,
    is_continued,
    qkv_stride,
    group,
    MATRICES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Store the last WIDTH - 1 inputs before flat token `end`, of the `group`-th INPUTS channels, in a state.

    If the state is the sequence's own one, inputs move to lower addresses. One warp loads all before it stores any.
    """
    index = tl.arange(0, triton.next_power_of_2(WIDTH))
    channel = group * INPUTS + tl.arange(0, INPUTS)
    mask = (index < WIDTH - 1)[:, None] & (channel < CHANNELS)[None, :]
    token = (end - (WIDTH - 1) + index).to(tl.int64)
    values = _load_inputs(
        qkv, own + MATRICES, token, channel, mask, start, is_continued, qkv_stride, WIDTH, CHANNELS
    )
    tl.store(to + MATRICES + index[:, None] * CHANNELS + channel[None, :], values, mask=mask)
