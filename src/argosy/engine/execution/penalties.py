"""Repetition, presence and frequency penalties: a row pays for the tokens that it has, not for the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.execution.logit_edits import LogitEdits
    from argosy.engine.scheduling import AdmittedSequence

MIN_TOKEN_CAPACITY = 1024
"""Room for the tokens of a row at first; doubled when a longer sequence comes."""


class Penalties:
    """The penalties of R rows, and the tokens that they are for."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.active_rows = np.zeros(rows, bool)
        self._vocab_size = vocab_size
        self._device = device
        self._repetition = np.ones(rows, np.float32)
        self._presence = np.zeros(rows, np.float32)
        self._frequency = np.zeros(rows, np.float32)
        self._lengths = np.zeros(rows, np.int64)
        self._output_counts = torch.empty(0)
        """[R, V] int32: how often each token was output; allocated when a penalty is first used."""
        self._tokens = torch.empty(0)
        """[R, room] int64: prompt and output; beyond a row's length its first token, again and again."""

    def admit(self, admission: AdmittedSequence) -> None:
        """Take over a row."""
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

    def apply(self, edits: LogitEdits, batch_rows: NDArray[np.int64]) -> None:
        """Change the i-th row of logits as row `which[i]` asks; inactive rows stay as they are."""
        some = np.flatnonzero(self.active_rows[batch_rows])
        if not some.size:
            return
        rows = batch_rows[some]
        index, places = self._tensor(some)[:, None], self._tensor(rows)[:, None]
        ids = self._tokens[places[:, 0], : int(self._lengths[rows].max())]
        counts, old = self._output_counts[places, ids], edits.logits[index, ids]
        repetition = self._tensor(self._repetition[rows])[:, None]
        new = torch.where(old > 0, old / repetition, old * repetition)
        new -= self._tensor(self._frequency[rows])[:, None] * counts
        new -= self._tensor(self._presence[rows])[:, None] * (counts > 0)
        edits.set_values(
            (index, ids), new
        )  # a token that a row has twice is given the same value twice

    def record_output(self, batch_rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Count `tokens[i]` ([N], on the device; below 0: any) as output of row `which[i]`."""
        some = np.flatnonzero(self.active_rows[batch_rows])
        if not some.size:
            return
        rows = batch_rows[some]
        self._reserve(int(self._lengths[rows].max()) + 1)
        places, drawn = self._tensor(rows), tokens[self._tensor(some)].clamp_(min=0)
        self._output_counts[places, drawn] += 1
        self._tokens[places, self._tensor(self._lengths[rows])] = drawn
        self._lengths[rows] += 1

    def _reserve(self, length: int) -> None:
        """Make room for `length` tokens in every row."""
        rows = len(self.active_rows)
        if not self._output_counts.numel():
            shape = (rows, self._vocab_size)
            self._output_counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=self._device)
        room = self._tokens.shape[1]
        if length > room:
            more = max(MIN_TOKEN_CAPACITY, 2 * room, length) - room
            self._tokens = torch.cat((self._tokens, self._tokens[:, :1].expand(rows, more)), 1)

    def _tensor(self, values: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
