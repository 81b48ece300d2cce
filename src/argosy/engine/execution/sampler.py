"""From logits to the next tokens, for all rows at once; each row's result depends on that row alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.logit_edits import LogitEdits
from argosy.engine.execution.penalties import Penalties
from argosy.engine.execution.persistent_batch import RaggedTable
from argosy.engine.execution.random_numbers import uniform_random
from argosy.engine.execution.sampling_ops import LOG2E, SamplingMetadata, SamplingOps
from argosy.engine.execution.sampling_ops_cpu import create_cpu_sampling_ops
from argosy.engine.scheduling import Logprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.scheduling import AdmittedSequence

NEG_INF = float("-inf")
MAX_LOGIT_SCALE = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What `Sampler` drew for S rows."""

    tokens: Tensor
    """[S] int64, on the device; -1 for rows whose logits were not finite."""
    logprobs: dict[int, Logprob]
    """By batch index, for the valid rows that asked; of the logits as the model gave them."""

    @property
    def invalid_rows(self) -> list[int]:
        """Batch indices whose logits were not finite; waits for the device."""
        found: list[int] = torch.nonzero(self.tokens < 0).flatten().tolist()
        return found


class Sampler:
    """The sampling parameters of R rows, and the counts that penalties need."""

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device, ops: SamplingOps | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops or create_sampling_ops(device)
        self._logit_scale = np.zeros(rows, np.float32)
        self._top_k = np.full(rows, vocab_size, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._log2_min_p = np.full(rows, NEG_INF, np.float32)
        self._seeds = np.zeros(rows, np.uint64)
        self._min_positions = np.zeros(rows, np.int64)
        self._top_logprobs = np.full(rows, -1, np.int64)
        self._has_token_limits = np.zeros(rows, bool)
        """Rows with a logit bias or allowed tokens."""
        self._penalties = Penalties(rows, vocab_size, device)
        self._bias = RaggedTable(rows, device)
        self._allowed = RaggedTable(rows, device)
        self._early_stop_tokens = RaggedTable(rows, device)
        """Tokens that may not come before `min_tokens`."""

    def admit(self, admission: AdmittedSequence, end_token_ids: list[int]) -> None:
        """Take over a row; `ends` are the tokens that may not be sampled before `min_tokens`."""
        row, params = admission.row, admission.params
        heat = params.temperature
        self._logit_scale[row] = min(LOG2E / heat, MAX_LOGIT_SCALE) if heat > 0 else 0.0
        self._top_k[row] = (
            min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        )
        self._top_p[row] = params.top_p
        self._log2_min_p[row] = math.log2(params.min_p) if params.min_p > 0 else NEG_INF
        self._seeds[row] = np.uint64(params.seed or 0)
        self._min_positions[row] = admission.prompt_len + params.min_tokens
        self._top_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias.set(row, list(params.logit_bias), list(params.logit_bias.values()))
        allowed = list(params.allowed_token_ids)
        self._allowed.set(row, allowed, [0.0] * len(allowed))
        self._has_token_limits[row] = bool(params.logit_bias) or bool(allowed)
        barred = end_token_ids if params.min_tokens > 0 else []
        self._early_stop_tokens.set(row, barred, [0.0] * len(barred))
        self._penalties.admit(admission)

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> SamplerOutput:
        """Draw the token at `positions[i]` for `rows[i]` from `logits[i]`.

        logits: [S, V] float32, changed where rows ask for it and given back as they came: copies of
        them would cost more than the draw.
        rows, positions: [S] int64, in host memory, so that nobody waits for the device to tell them.
        """
        where, places = rows.numpy(), positions.numpy()
        edits = LogitEdits(logits)
        self._apply_edits(edits, where, places)
        tokens = self._ops.sample(logits, self._build_metadata(where, places))
        edits.undo()
        self._penalties.record_output(where, tokens)
        return SamplerOutput(tokens, self._sampled_logprobs(logits, where, tokens))

    def compute_logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> list[Logprob]:
        """Log-probability and rank of `tokens[i]` under `logits[i]` ([N, V]), and the `top` likeliest."""
        which = np.arange(len(tokens))
        return compute_logprobs(
            self._ops, logits, which, tokens, np.full(len(which), num_top, np.int64)
        )

    def _build_metadata(
        self, where: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> SamplingMetadata:
        return SamplingMetadata(
            self._logit_scale[where],
            self._top_k[where],
            self._top_p[where],
            self._log2_min_p[where],
            uniform_random(self._seeds[where], positions),
        )

    def _apply_edits(
        self, edits: LogitEdits, where: NDArray[np.int64], places: NDArray[np.int64]
    ) -> None:
        """Bias, allowed tokens, no end before `min_tokens`, penalties; for row `where[i]` at `places[i]`."""
        if self._has_token_limits[where].any():
            self._apply_token_limits(edits, self._to_device(where))
        early = places < self._min_positions[where]
        if early.any():
            index, ids, _ = self._early_stop_tokens.select_rows(self._to_device(where))
            still = self._to_device(early)[index]
            edits.mask_out((index[still], ids[still]))
        self._penalties.apply(edits, where)

    def _apply_token_limits(self, edits: LogitEdits, rows: Tensor) -> None:
        """Logit bias and allowed tokens."""
        index, ids, values = self._bias.select_rows(rows)
        edits.set_values((index, ids), edits.logits[index, ids] + values)
        index, ids, _ = self._allowed.select_rows(rows)
        if len(index):
            kept = edits.logits[index, ids]
            edits.mask_out((index.unique(),))
            edits.set_values((index, ids), kept)

    def _sampled_logprobs(
        self, logits: Tensor, where: NDArray[np.int64], tokens: Tensor
    ) -> dict[int, Logprob]:
        """The log-probabilities of the valid rows that asked."""
        asked = np.flatnonzero(self._top_logprobs[where] >= 0)
        if asked.size:  # only now it is worth waiting for the device
            asked = asked[tokens.cpu().numpy()[asked] >= 0]
        if not asked.size:
            return {}
        tops = self._top_logprobs[where[asked]]
        found = compute_logprobs(self._ops, logits, asked, tokens[self._to_device(asked)], tops)
        return dict(zip(asked.tolist(), found, strict=True))

    def _to_device(self, some: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(some).to(self._device, non_blocking=True)


def create_sampling_ops(device: torch.device) -> SamplingOps:
    """The operations for a device; on the CPU with the calling thread's number of torch threads."""
    if device.type == "cpu":
        return create_cpu_sampling_ops(torch.get_num_threads())
    from argosy.engine.execution.gpu.sampling import TritonSamplingOps

    return TritonSamplingOps()


def compute_logprobs(
    ops: SamplingOps,
    logits: Tensor,
    logit_rows: NDArray[np.int64],
    tokens: Tensor,
    top_counts: NDArray[np.int64],
) -> list[Logprob]:
    """Log-probability and rank of `tokens[i]` under `logits[which[i]]`, and the `tops[i]` likeliest."""
    told = ops.compute_logprobs(logits, logit_rows, tokens, top_counts)
    rows = zip(
        tokens.tolist(),
        told.token_logprobs.tolist(),
        told.ranks.tolist(),
        told.top_ids.tolist(),
        told.top_logprobs.tolist(),
        top_counts.tolist(),
        strict=True,
    )
    return [
        Logprob(token, lp, rank, list(zip(likeliest[:k], theirs[:k], strict=True)))
        for token, lp, rank, likeliest, theirs, k in rows
    ]
