"""Changes of logits before sampling: single logits, penalties for a row's tokens, and masks of all tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.scheduling import AdmittedSequence

INFINITY = float("inf")


class LogitEdits:
    """Sequence of edits of `logits` [S, V] float32, which `undo` reverts."""

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

    def mask_rows(self, rows: Tensor, masked: Tensor, restored_rows: Tensor) -> None:
        """Add `masked` [M, V], which has 0 for allowed tokens and -infinity for others, to some rows.

        Sampling still detects NaN, which stays NaN, and infinity, which becomes NaN. `undo` restores only
        `restored_rows`, a subset of `rows`. A copy of all rows would cost more than sampling.
        """
        if len(restored_rows):
            self._saved.append(((restored_rows,), self.logits[restored_rows]))
        if self.logits.device.type == "cpu":  # index_add_ is not vectorized there
            for row, values in zip(rows.tolist(), masked, strict=True):
                self.logits[row].add_(values)
        else:
            self.logits.index_add_(0, rows, masked)

    def undo(self) -> None:
        """Restore the original logits, bit for bit, except those of masked rows that need not be restored."""
        for index, values in reversed(self._saved):
            self.logits[index] = values
        self._saved.clear()


MIN_TOKEN_CAPACITY = 1024
"""Initial token capacity of a row, which doubles when a longer sequence arrives."""


class Penalties:
    """Penalties of R rows, and the tokens to which they apply."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.active_rows = np.zeros(rows, bool)
        self._vocab_size = vocab_size
        self._device = device
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
        self.active_rows[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        if self.active_rows[row]:
            self._reserve(len(admission.tokens))
            tokens = torch.tensor(admission.tokens, device=self._device)
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
        index, row_index = self._tensor(active)[:, None], self._tensor(rows)[:, None]
        ids = self._tokens[row_index[:, 0], : int(self._lengths[rows].max())]
        if earlier_drafts is None:
            counts = self._output_counts[row_index, ids]
        else:
            drafts = self._tensor(earlier_drafts[active])
            ids = torch.cat((ids, torch.where(drafts < 0, ids[:, :1], drafts)), 1)
            counts = self._output_counts[row_index, ids]
            counts += (ids[:, :, None] == drafts[:, None, :]).sum(-1, dtype=torch.int32)
        old_logits = edits.logits[index, ids]
        repetition = self._tensor(self._repetition[rows])[:, None]
        new_logits = torch.where(old_logits > 0, old_logits / repetition, old_logits * repetition)
        new_logits -= self._tensor(self._frequency[rows])[:, None] * counts
        new_logits -= self._tensor(self._presence[rows])[:, None] * (counts > 0)
        # A token that occurs twice in a row gets the same value twice.
        edits.set_values((index, ids), new_logits)

    def record_output(self, batch_rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Count `tokens[i]` as output of row `batch_rows[i]`.

        `tokens` is [N], on the device. A negative token belongs to a failed row, whose counts no longer matter.
        """
        active = np.flatnonzero(self.active_rows[batch_rows])
        if not active.size:
            return
        rows = batch_rows[active]
        self._reserve(int(self._lengths[rows].max()) + 1)
        row_index, sampled = self._tensor(rows), tokens[self._tensor(active)].clamp_(min=0)
        self._output_counts[row_index, sampled] += 1
        self._tokens[row_index, self._tensor(self._lengths[rows])] = sampled
        self._lengths[rows] += 1

    def _reserve(self, length: int) -> None:
        """Grow the capacity of every row to at least `length` tokens."""
        rows = len(self.active_rows)
        if not self._output_counts.numel():
            shape = (rows, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=self._device)
        capacity = self._tokens.shape[1]
        if length > capacity:
            added = max(MIN_TOKEN_CAPACITY, 2 * capacity, length) - capacity
            self._tokens = torch.cat((self._tokens, self._tokens[:, :1].expand(rows, added)), 1)

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


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
        expanded = _octet_table(logits.dtype, logits.device).index_select(0, octets)
        return expanded.view(len(self.words), -1)[:, : logits.shape[1]]


@lru_cache
def _octet_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the table [256, 8] of the numbers that the eight bits of an octet stand for."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    table = torch.zeros(256, 8).masked_fill_(torch.from_numpy(bits == 0), float("-inf"))
    return table.to(device, dtype)
