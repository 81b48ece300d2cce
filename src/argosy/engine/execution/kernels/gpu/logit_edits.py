"""Edits of logits on the GPU, with exactly the logits that torch/logit_edits.py gives to valid rows.

Every row has its added values and the mask of its allowed tokens in tables on the device, which are written when a
sequence joins the batch. Penalties read a table of all tokens of the vocabulary, so that a token that occurs twice is
changed once. A step copies one array of numbers to the device, for its edits and for sampling. The host never waits.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.device import Device
from argosy.engine.execution.kernels.gpu.sampling import (
    KERNEL_OPTIONS,
    VOCAB_TILE,
    TritonSamplingOps,
    pack_options,
)
from argosy.engine.execution.kernels.torch.logit_edits import RowEdits, StepEdits, has_penalties
from argosy.engine.execution.kernels.torch.sampling_ops import SamplingMetadata
from argosy.engine.scheduling import AdmittedSequence

PAIR_TILE = 256
"""Number of added values that a program handles at a time."""
COUNT_TILE = 256
"""Number of sampled tokens that a program counts."""
MIN_PAIR_CAPACITY = 64
"""Initial number of added values of a row, which doubles when a row has more."""
PROMPT_FLAG: tl.constexpr = tl.constexpr(1 << 30)
"""Is added to the output count of a token that occurs in the prompt."""
NO_MASK = -1
ROW_MASK = -2
"""Stands for the row's allowed tokens, in place of the index of a mask of the step."""


class TritonLogitSampler:
    """Sampling on one GPU. A sample with edits and log-probabilities has its logits copied, and then restored."""

    def __init__(self, device: Device, rows: int, vocab_size: int) -> None:
        self.ops = TritonSamplingOps(device)
        self._device = device
        self._vocab_size = vocab_size
        self._num_pairs = np.zeros(rows, np.int64)
        self._has_allowed = np.zeros(rows, bool)
        self._penalties = np.zeros((3, rows), np.float32)
        """Factor of repetition, and the penalties of frequency and presence."""
        self._is_penalized = np.zeros(rows, bool)
        self._pairs = self._empty(rows, 0)
        """[R, 3 * capacity] int32, a row's n tokens, n values, and n values of early samples. Values are float32."""
        self._allowed = self._empty(0, 1)
        """[R, W] int32, masks of allowed tokens. Allocated when first used."""
        self._counts = self._empty(0)
        """[R, V] int32, output count of each token, plus `PROMPT_FLAG`. Allocated when first used."""
        self._row_options = self._empty(0)
        """Numbers of the last step with edits."""

    def admit(self, admission: AdmittedSequence, edits: RowEdits) -> None:
        row, params = admission.row, admission.params
        ids, values, early_values = edits.added_values()
        self._num_pairs[row] = len(ids)
        if ids:
            pairs = np.array(ids, np.int32)
            numbers = np.array((values, early_values), np.float32).view(np.int32)
            self._reserve_pairs(len(ids))
            self._upload(np.concatenate((pairs, *numbers)), self._pairs[row, : 3 * len(ids)])
        self._has_allowed[row] = bool(edits.allowed)
        if edits.allowed:
            self._admit_allowed(row, np.array(edits.allowed))
        self._penalties[:, row] = (
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
        self._is_penalized[row] = has_penalties(params)
        if self._is_penalized[row]:
            self._admit_tokens(row, admission.tokens, admission.prompt_len)

    def sample(self, logits: Tensor, metadata: SamplingMetadata, step: StepEdits) -> Tensor:
        options = pack_options(metadata, self._vocab_size)
        if not self._has_edits(step).any():
            return self.ops.launch(logits, options, self._upload(options.columns))
        num_added, num_edited, num_restored, columns = self._pack_edits(step)
        row_options = self._upload(np.concatenate((options.columns, columns)))
        self._row_options = row_options
        restored = row_options[16, :num_restored].to(torch.int64) if num_restored else None
        original = None if restored is None else logits.index_select(0, restored)
        self._edit(logits, row_options, step, num_added, num_edited)
        tokens = self.ops.launch(logits, options, row_options)
        if restored is not None and original is not None:
            logits.index_copy_(0, restored, original)
        return tokens

    def record_output(self, step: StepEdits, tokens: Tensor) -> None:
        if self._is_penalized[step.rows].any():
            rows = len(tokens)
            _count_tokens[(triton.cdiv(rows, COUNT_TILE),)](
                tokens, self._row_options, self._counts, rows, self._vocab_size, TILE=COUNT_TILE
            )

    def _has_edits(self, step: StepEdits) -> NDArray[np.bool_]:
        """Return whether the logits of each sample are edited."""
        rows = step.rows
        has_edits = (self._num_pairs[rows] > 0) | self._has_allowed[rows] | self._is_penalized[rows]
        if step.masks is not None:
            has_edits[step.masks.index] = True
        return has_edits

    def _pack_edits(self, step: StepEdits) -> tuple[int, int, int, NDArray[np.float64]]:
        """Pack the edits of S samples into columns 7 and up of the array that `pack_options` begins.

        Returns:
            The lengths of three lists, and columns [10 + K, S]. They are: row, number of pairs, whether the sample is
            early, three penalties, and index of the mask. Then the lists: samples with pairs, samples with penalties or
            a mask, and samples to restore. Then K earlier drafts.
        """
        rows = step.rows
        masks = np.where(self._has_allowed[rows], ROW_MASK, NO_MASK)
        if step.masks is not None:
            masks[step.masks.index] = np.arange(len(step.masks.index))
        num_drafts = 0 if step.earlier_drafts is None else step.earlier_drafts.shape[1]
        columns = np.zeros((10 + num_drafts, len(rows)))
        columns[:7] = (
            rows,
            self._num_pairs[rows],
            step.is_early,
            *self._penalties[:, rows],
            masks,
        )
        if step.earlier_drafts is not None:
            columns[10:] = step.earlier_drafts.T
        lists = [
            np.flatnonzero(selected)
            for selected in (
                self._num_pairs[rows] > 0,
                self._is_penalized[rows] | (masks != NO_MASK),
                self._has_edits(step) & step.has_logprobs,
            )
        ]
        for column, samples in zip(columns[7:10], lists, strict=True):
            column[: len(samples)] = samples
        num_added, num_edited, num_restored = map(len, lists)
        return num_added, num_edited, num_restored, columns

    def _edit(
        self, logits: Tensor, row_options: Tensor, step: StepEdits, num_added: int, num_edited: int
    ) -> None:
        (rows, vocab), stride = logits.shape, logits.stride(0)
        if num_added:
            _add_values[(num_added,)](
                logits,
                row_options,
                self._pairs,
                rows,
                stride,
                self._pairs.shape[1],
                TILE=PAIR_TILE,
                num_warps=4,
            )
        if num_edited:
            masks = self._allowed if step.masks is None else step.masks.words
            _edit_logits[(num_edited, triton.cdiv(vocab, VOCAB_TILE))](
                logits,
                row_options,
                self._counts,
                masks,
                self._allowed,
                rows,
                vocab,
                stride,
                masks.shape[1],
                self._allowed.shape[1],
                0 if step.earlier_drafts is None else step.earlier_drafts.shape[1],
                TILE=VOCAB_TILE,
                **KERNEL_OPTIONS,
            )

    def _admit_allowed(self, row: int, allowed: NDArray[np.int64]) -> None:
        words = -(-self._vocab_size // 32)
        if not len(self._allowed):
            self._allowed = self._empty(len(self._num_pairs), words)
        bits = np.zeros(32 * words, np.uint8)
        bits[allowed] = 1
        self._upload(np.packbits(bits, bitorder="little").view(np.int32), self._allowed[row])

    def _admit_tokens(self, row: int, tokens: list[int], prompt_len: int) -> None:
        """Count the tokens of a sequence."""
        if not self._counts.numel():
            self._counts = self._empty(len(self._num_pairs), self._vocab_size)
        ids, index = np.unique(np.array(tokens, np.int64), return_inverse=True)
        counts = np.bincount(index[prompt_len:], minlength=len(ids))
        counts[np.unique(index[:prompt_len])] += PROMPT_FLAG.value
        uploaded = self._upload(np.stack((ids, counts)))
        self._counts[row].zero_().index_copy_(0, uploaded[0], uploaded[1].to(torch.int32))

    def _reserve_pairs(self, count: int) -> None:
        """Grow the capacity of every row to at least `count` pairs."""
        size = self._pairs.shape[1]
        if 3 * count > size:
            grown = self._empty(len(self._pairs), max(3 * MIN_PAIR_CAPACITY, 2 * size, 3 * count))
            grown[:, :size] = self._pairs
            self._pairs = grown

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device.torch_device)

    def _upload(self, values: NDArray[np.generic], out: Tensor | None = None) -> Tensor:
        return self._device.to_device(torch.from_numpy(values), out)


@triton.jit(do_not_specialize=["rows", "pair_stride"])
def _add_values(logits, row_options, pairs, rows, stride, pair_stride, TILE: tl.constexpr):
    """Add the values of a row to the logits of a sample."""
    sample = tl.load(row_options + 14 * rows + tl.program_id(0)).to(tl.int64)
    options = row_options + sample
    row = tl.load(options + 7 * rows).to(tl.int64)
    count = tl.load(options + 8 * rows).to(tl.int32)
    is_early = tl.load(options + 9 * rows).to(tl.int32)
    tokens = pairs + row * pair_stride
    values = tokens + count + count * is_early
    for first in range(0, count, TILE):
        index = first + tl.arange(0, TILE)
        mask = index < count
        token = tl.load(tokens + index, mask=mask, other=0)
        value = tl.load(values + index, mask=mask, other=0).to(tl.float32, bitcast=True)
        logit = logits + sample * stride + token
        tl.store(logit, tl.load(logit, mask=mask, other=0.0) + value, mask=mask)


@triton.jit(do_not_specialize=["rows", "mask_stride", "allowed_stride", "drafts"])
def _edit_logits(
    logits,
    row_options,
    counts,
    masks,
    allowed,
    rows,
    vocab,
    stride,
    mask_stride,
    allowed_stride,
    drafts,
    TILE: tl.constexpr,
):
    """Apply penalties and a mask to one tile of the logits of a sample."""
    sample = tl.load(row_options + 15 * rows + tl.program_id(0)).to(tl.int64)
    options = row_options + sample
    row = tl.load(options + 7 * rows).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_vocab = token < vocab
    logit = logits + sample * stride + token
    x = tl.load(logit, mask=in_vocab, other=0.0)
    repetition = tl.load(options + 10 * rows).to(tl.float32)
    frequency = tl.load(options + 11 * rows).to(tl.float32)
    presence = tl.load(options + 12 * rows).to(tl.float32)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        state = tl.load(counts + row * vocab + token, mask=in_vocab, other=0)
        count = state & (PROMPT_FLAG - 1)
        for draft in range(drafts):
            count += (token == tl.load(options + (17 + draft) * rows).to(tl.int32)).to(tl.int32)
        changed = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        changed -= frequency * count.to(tl.float32)
        changed -= presence * (count > 0).to(tl.float32)
        x = tl.where((state != 0) | (count > 0), changed, x)
    mask = tl.load(options + 13 * rows).to(tl.int64)
    if mask != -1:
        words = allowed + row * allowed_stride
        if mask >= 0:
            words = masks + mask * mask_stride
        word = tl.load(words + token // 32, mask=in_vocab, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, x + float("-inf"))
    tl.store(logit, x, mask=in_vocab)


@triton.jit(do_not_specialize=["rows"])
def _count_tokens(tokens, row_options, counts, rows, vocab, TILE: tl.constexpr):
    """Count the valid tokens of the samples with penalties."""
    sample = tl.program_id(0) * TILE + tl.arange(0, TILE)
    options = row_options + sample
    mask = sample < rows
    row = tl.load(options + 7 * rows, mask=mask, other=0).to(tl.int64)
    repetition = tl.load(options + 10 * rows, mask=mask, other=1)
    frequency = tl.load(options + 11 * rows, mask=mask, other=0)
    presence = tl.load(options + 12 * rows, mask=mask, other=0)
    token = tl.load(tokens + sample, mask=mask, other=-1)
    mask &= (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    tl.atomic_add(counts + row * vocab + token, 1, mask=mask & (token >= 0), sem="relaxed")
