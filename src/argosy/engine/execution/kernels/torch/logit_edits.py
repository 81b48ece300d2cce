"""Edits of logits before sampling: added values, allowed tokens, penalties and masks. The interface, and the CPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.kernels.torch.sampling_ops import SamplingMetadata, SamplingOps
from argosy.engine.scheduling import AdmittedSequence
from argosy.protocol import SamplingParams

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class RowEdits:
    """Edits of the logits of one row, beside its penalties."""

    bias: Mapping[int, float]
    """Token -> value that is added to its logit."""
    allowed: Sequence[int]
    """The only tokens that may be sampled. Empty for all tokens."""
    banned: Sequence[int]
    early_banned: Sequence[int]
    """Tokens that are banned from early samples only."""

    def added_values(self) -> tuple[list[int], list[float], list[float]]:
        """Return tokens, and the values to add to their logits: for most samples, and for early ones.

        To a banned token, -infinity is added. Sampling still detects NaN, which stays NaN, and infinity, which becomes
        NaN.
        """
        values = dict(self.bias) | dict.fromkeys(self.banned, -INFINITY)
        early = values | dict.fromkeys(self.early_banned, -INFINITY)
        return list(early), [values.get(token, 0.0) for token in early], list(early.values())


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of M of the rows of logits."""

    index: NDArray[np.int64]
    """[M], ascending indices of the rows, in host memory."""
    words: Tensor
    """[M, W] int32, on the device. Bit i of the words, low bits first, is set if token i is allowed."""

    def expand(self, logits: Tensor) -> Tensor:
        """Return a tensor [M, V] with 0 for allowed tokens and -infinity for others, in the dtype of `logits` [S, V].

        Bits beyond the vocabulary are ignored.
        """
        octets = self.words.view(torch.uint8).flatten().to(torch.int32)
        expanded = _octet_table(logits.dtype).index_select(0, octets)
        return expanded.view(len(self.words), -1)[:, : logits.shape[1]]


@lru_cache
def _octet_table(dtype: torch.dtype) -> Tensor:
    """Return the table [256, 8] of the numbers that the eight bits of an octet stand for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = torch.zeros(256, 8).masked_fill_(torch.from_numpy(bits == 0), -INFINITY)
    return table.to(dtype)


@dataclass(frozen=True, slots=True)
class StepEdits:
    """Edits of the logits of the S samples of a step, as host arrays."""

    rows: NDArray[np.int64]
    """[S], row of each sample. A row occurs several times in a step with drafts."""
    is_early: NDArray[np.bool_]
    """[S], whether tokens are banned that are banned from early samples."""
    has_logprobs: NDArray[np.bool_]
    """[S], whether the logits are read after sampling."""
    masks: TokenMasks | None = None
    earlier_drafts: NDArray[np.int64] | None = None
    """[S, K], drafts that count as output before each sample, padded with negative numbers."""
    offsets: NDArray[np.int64] | None = None
    """[S], number of drafts before each sample."""


class LogitSampler(Protocol):
    """Sampling for R rows, from logits that are edited as each row requests."""

    @property
    def ops(self) -> SamplingOps:
        """Operations on logits as they are."""
        ...

    def admit(self, admission: AdmittedSequence, edits: RowEdits) -> None:
        """Set the edits of a row for a sequence that joins the batch."""
        ...

    def sample(self, logits: Tensor, metadata: SamplingMetadata, step: StepEdits) -> Tensor:
        """Sample a token from each row of logits [S, V] float32, which are edited in place, as `ops.sample` does.

        Logits of samples with log-probabilities are restored afterwards, bit for bit.
        """
        ...

    def record_output(self, step: StepEdits, tokens: Tensor) -> None:
        """Count tokens [S] as output of their rows, without negative ones. Follows `sample` for the same step."""
        ...


class TorchLogitSampler:
    """Sampling on the CPU, where no row is copied. All logits are restored but those of masked rows."""

    def __init__(self, ops: SamplingOps, rows: int, vocab_size: int) -> None:
        self.ops = ops
        self._added = RaggedTable(rows)
        self._allowed = RaggedTable(rows)
        self._penalties = Penalties(rows, vocab_size)

    def admit(self, admission: AdmittedSequence, edits: RowEdits) -> None:
        unchanged = [0.0] * len(edits.allowed)
        self._added.set(admission.row, *edits.added_values())
        self._allowed.set(admission.row, edits.allowed, unchanged, unchanged)
        self._penalties.admit(admission)

    def sample(self, logits: Tensor, metadata: SamplingMetadata, step: StepEdits) -> Tensor:
        edits = LogitEdits(logits)
        if step.masks is not None:  # first, so that all other edits act on the allowed tokens
            edits.mask_rows(step.masks, step.has_logprobs)
        if self._added.has_pairs(step.rows):
            index, ids, values = self._added.select_rows(step.rows, step.is_early)
            edits.set_values((index, ids), logits[index, ids] + values)
        if self._allowed.has_pairs(step.rows):
            index, ids, _ = self._allowed.select_rows(step.rows, step.is_early)
            kept = logits[index, ids]
            edits.mask_out((index.unique(),))
            edits.set_values((index, ids), kept)
        self._penalties.apply(edits, step.rows, step.earlier_drafts)
        tokens = self.ops.sample(logits, metadata)
        edits.undo()
        return tokens

    def record_output(self, step: StepEdits, tokens: Tensor) -> None:
        if step.offsets is None:
            self._penalties.record_output(step.rows, tokens)
        elif self._penalties.active_rows[step.rows].any():
            is_valid = tokens.numpy() >= 0
            for offset in range(int(step.offsets.max()) + 1):  # one sample of each row at a time
                samples = np.flatnonzero(is_valid & (step.offsets == offset))
                self._penalties.record_output(step.rows[samples], tokens[samples])


class LogitEdits:
    """Sequence of edits of `logits` [S, V] float32 in host memory, which `undo` reverts."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self._saved: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def set_values(self, index: tuple[Tensor, ...], values: Tensor) -> None:
        """Set `logits[index]`. An index that occurs twice must have the same value twice."""
        self._saved.append((index, self.logits[index]))
        self.logits[index] = values

    def mask_out(self, index: tuple[Tensor, ...]) -> None:
        """Set `logits[index]` to -infinity, except for NaN and infinity, which sampling must detect."""
        values = self.logits[index]
        self.set_values(index, values.masked_fill(values < INFINITY, -INFINITY))

    def mask_rows(self, masks: TokenMasks, has_logprobs: NDArray[np.bool_]) -> None:
        """Add -infinity to all tokens that masks exclude.

        `undo` restores only the rows with log-probabilities. A copy of all rows would cost more than sampling.
        """
        restored = torch.from_numpy(masks.index[has_logprobs[masks.index]])
        if len(restored):
            self._saved.append(((restored,), self.logits[restored]))
        # index_add_ is not vectorized
        for row, values in zip(masks.index.tolist(), masks.expand(self.logits), strict=True):
            self.logits[row].add_(values)

    def undo(self) -> None:
        """Restore the original logits, bit for bit, except those of masked rows that need not be restored."""
        for index, values in reversed(self._saved):
            self.logits[index] = values
        self._saved.clear()


class RaggedTable:
    """Table of any number of tokens with values per row, with vectorized selection for a batch."""

    def __init__(self, rows: int) -> None:
        self._lists: dict[int, NDArray[np.float64]] = {}
        """Row -> [3, n], tokens, their values, and their values in early samples."""
        self._packed = np.empty((3, 0))
        self._starts = np.zeros(rows, np.int64)
        """First pair of each row that has any."""
        self._counts = np.zeros(rows, np.int64)

    def has_pairs(self, rows: NDArray[np.int64]) -> bool:
        """Return whether any of the rows has a pair."""
        return bool(self._counts[rows].any())

    def set(
        self, row: int, ids: Sequence[int], values: list[float], early_values: list[float]
    ) -> None:
        """Replace the row's tokens and values. Empty `ids` remove them."""
        if ids:
            self._lists[row] = np.array((ids, values, early_values), np.float64)
        elif self._lists.pop(row, None) is None:
            return
        self._counts[:] = 0
        start = 0
        for listed, pairs in self._lists.items():
            self._starts[listed], self._counts[listed] = start, pairs.shape[1]
            start += pairs.shape[1]
        self._packed = np.concatenate([np.empty((3, 0)), *self._lists.values()], axis=1)

    def select_rows(
        self, rows: NDArray[np.int64], is_early: NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the pairs of a batch of rows [S], in which a row may occur several times.

        Returns:
            Indices into the batch [N], token ids [N] and values [N].
        """
        counts = self._counts[rows]
        firsts = counts.cumsum() - counts
        pairs = np.arange(counts.sum()) + (self._starts[rows] - firsts).repeat(counts)
        index = np.arange(len(rows)).repeat(counts)
        ids, values, early_values = self._packed[:, pairs]
        values = np.where(is_early[index], early_values, values).astype(np.float32)
        return (
            torch.from_numpy(index),
            torch.from_numpy(ids.astype(np.int64)),
            torch.from_numpy(values),
        )


MIN_TOKEN_CAPACITY = 1024
"""Initial token capacity of a row, which doubles when a longer sequence arrives."""


def has_penalties(params: SamplingParams) -> bool:
    """Return whether any penalty has an effect."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


class Penalties:
    """Penalties of R rows, and the tokens to which they apply, in host memory."""

    def __init__(self, rows: int, vocab_size: int) -> None:
        self.active_rows = np.zeros(rows, bool)
        self._vocab_size = vocab_size
        self._repetition = np.ones(rows, np.float32)
        self._presence = np.zeros(rows, np.float32)
        self._frequency = np.zeros(rows, np.float32)
        self._lengths = np.zeros(rows, np.int64)
        self._output_counts = torch.empty(0)
        """[R, V] int32, output count of each token. Allocated when a penalty is first used."""
        self._tokens = torch.empty(0)
        """[R, capacity] int64, prompt and output tokens, padded with the row's first token."""

    def admit(self, admission: AdmittedSequence) -> None:
        """Fill a row for a sequence that joins the batch."""
        row, params = admission.row, admission.params
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self.active_rows[row] = has_penalties(params)
        if self.active_rows[row]:
            self._reserve(len(admission.tokens))
            tokens = torch.tensor(admission.tokens)
            output = tokens[admission.prompt_len :]
            self._output_counts[row] = torch.bincount(output, minlength=self._vocab_size)
            self._tokens[row] = tokens[0]
            self._tokens[row, : len(tokens)] = tokens
            self._lengths[row] = len(tokens)

    def apply(
        self,
        edits: LogitEdits,
        batch_rows: NDArray[np.int64],
        earlier_drafts: NDArray[np.int64] | None = None,
    ) -> None:
        """Apply the penalties of row `batch_rows[i]` to the i-th row of logits. Rows without penalties are skipped.

        The drafts `earlier_drafts[i]` [K], padded with negative numbers, count as output before the i-th row.
        """
        active = np.flatnonzero(self.active_rows[batch_rows])
        if not active.size:
            return
        rows = batch_rows[active]
        index, row_index = torch.from_numpy(active)[:, None], torch.from_numpy(rows)[:, None]
        ids = self._tokens[row_index[:, 0], : int(self._lengths[rows].max())]
        if earlier_drafts is None:
            counts = self._output_counts[row_index, ids]
        else:
            drafts = torch.from_numpy(earlier_drafts[active])
            ids = torch.cat((ids, torch.where(drafts < 0, ids[:, :1], drafts)), 1)
            counts = self._output_counts[row_index, ids]
            counts += (ids[:, :, None] == drafts[:, None, :]).sum(-1, dtype=torch.int32)
        old_logits = edits.logits[index, ids]
        repetition = torch.from_numpy(self._repetition[rows])[:, None]
        new_logits = torch.where(old_logits > 0, old_logits / repetition, old_logits * repetition)
        new_logits -= torch.from_numpy(self._frequency[rows])[:, None] * counts
        new_logits -= torch.from_numpy(self._presence[rows])[:, None] * (counts > 0)
        # A token that occurs twice in a row gets the same value twice.
        edits.set_values((index, ids), new_logits)

    def record_output(self, batch_rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Count `tokens[i]` as output of row `batch_rows[i]`.

        A negative token belongs to a failed row, whose counts no longer matter.
        """
        active = np.flatnonzero(self.active_rows[batch_rows])
        if not active.size:
            return
        rows = batch_rows[active]
        self._reserve(int(self._lengths[rows].max()) + 1)
        row_index, sampled = torch.from_numpy(rows), tokens[active].clamp_(min=0)
        self._output_counts[row_index, sampled] += 1
        self._tokens[row_index, torch.from_numpy(self._lengths[rows])] = sampled
        self._lengths[rows] += 1

    def _reserve(self, length: int) -> None:
        """Grow the capacity of every row to at least `length` tokens."""
        rows = len(self.active_rows)
        if not self._output_counts.numel():
            self._output_counts = torch.zeros((rows, self._vocab_size), dtype=torch.int32)
            self._tokens = torch.zeros(rows, 1, dtype=torch.int64)
        capacity = self._tokens.shape[1]
        if length > capacity:
            added = max(MIN_TOKEN_CAPACITY, 2 * capacity, length) - capacity
            self._tokens = torch.cat((self._tokens, self._tokens[:, :1].expand(rows, added)), 1)
