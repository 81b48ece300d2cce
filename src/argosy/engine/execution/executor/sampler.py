"""Sampler of the next tokens for all rows at once. Each row's result depends only on that row."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.draft_windows import DraftWindows
from argosy.engine.execution.executor.logit_edits import LogitEdits, Penalties, TokenMasks
from argosy.engine.execution.executor.persistent_batch import RaggedTable
from argosy.engine.execution.kernels.torch.sampling_ops import LOG2E, SamplingMetadata, SamplingOps
from argosy.engine.grammar import is_constrained
from argosy.engine.scheduling import AdmittedSequence, Logprob

NEG_INF = float("-inf")
MAX_LOGIT_SCALE = float(np.finfo(np.float32).max)


class Sampler:
    """Sampling parameters of R rows, and the token counts for their penalties."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device, ops: SamplingOps) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops
        self._logit_scale = np.zeros(rows, np.float32)
        self._top_k = np.full(rows, vocab_size, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._log2_min_p = np.full(rows, NEG_INF, np.float32)
        self._seeds = np.zeros(rows, np.uint64)
        self._min_positions = np.zeros(rows, np.int64)
        self._top_logprobs = np.full(rows, -1, np.int64)
        self._has_token_limits = np.zeros(rows, bool)
        """Whether each row has a logit bias, allowed tokens or banned tokens."""
        self._penalties = Penalties(rows, vocab_size, device)
        self._bias = RaggedTable(rows, device)
        self._allowed = RaggedTable(rows, device)
        self._banned = RaggedTable(rows, device)
        self._early_stop_tokens = RaggedTable(rows, device)
        """Tokens that are masked out before `min_tokens`."""

    def admit(self, admission: AdmittedSequence, end_token_ids: list[int]) -> None:
        """Fill a row for a sequence that joins the batch. `end_token_ids` are masked out before `min_tokens`.

        The mask of a constrained sequence includes its allowed, banned and end tokens.
        """
        row, params = admission.row, admission.params
        temperature = params.temperature
        self._logit_scale[row] = (
            min(LOG2E / temperature, MAX_LOGIT_SCALE) if temperature > 0 else 0.0
        )
        self._top_k[row] = (
            min(params.top_k, self._vocab_size) if params.top_k > 0 else self._vocab_size
        )
        self._top_p[row] = params.top_p
        self._log2_min_p[row] = math.log2(params.min_p) if params.min_p > 0 else NEG_INF
        self._seeds[row] = np.uint64(params.seed or 0)
        self._min_positions[row] = admission.prompt_len + params.min_tokens
        self._top_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias.set(row, list(params.logit_bias), list(params.logit_bias.values()))
        has_mask = is_constrained(params)
        allowed_ids = [] if has_mask else list(params.allowed_token_ids or ())
        banned_ids = [] if has_mask else list(params.banned_token_ids)
        early_stop_ids = [] if has_mask or params.min_tokens <= 0 else end_token_ids
        self._allowed.set(row, allowed_ids, [0.0] * len(allowed_ids))
        self._banned.set(row, banned_ids, [0.0] * len(banned_ids))
        self._early_stop_tokens.set(row, early_stop_ids, [0.0] * len(early_stop_ids))
        self._has_token_limits[row] = bool(params.logit_bias or allowed_ids or banned_ids)
        self._penalties.admit(admission)

    def __call__(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        masks: TokenMasks | None = None,
        windows: DraftWindows | None = None,
        failed_samples: Iterable[int] = (),
    ) -> tuple[Tensor, dict[int, Logprob]]:
        """Sample the token at `positions[i]` for `rows[i]` from `logits[i]`.

        Logits [S, V] float32 are edited in place, because a copy would cost more than sampling. They are restored,
        except for rows with a mask whose log-probabilities are not requested. Rows and positions are in host memory,
        which avoids waiting for the device. In a step with drafts, a row occurs once for each sample of its `windows`.

        Returns:
            Tokens [S] int64 on the device, and the log-probabilities under the unmodified logits, by batch index, for
            valid rows that requested them. A token is -1 if the logits were not finite, or if `DraftWindows.reject`
            rejects it.
        """
        edits = LogitEdits(logits)
        if masks is not None:
            self._apply_masks(edits, masks, rows)
        self._apply_edits(
            edits, rows, positions, None if windows is None else windows.earlier_drafts
        )
        tokens = self._ops.sample(logits, self._build_metadata(rows, positions))
        edits.undo()
        if windows is None:
            self._penalties.record_output(rows, tokens)
        else:
            tokens = windows.reject(tokens, failed_samples)
            self._record_windows(rows, tokens, windows.offsets)
        return tokens, self._sampled_logprobs(logits, rows, tokens)

    def compute_logprobs(
        self,
        logits: Tensor,
        logit_rows: NDArray[np.int64],
        tokens: Tensor,
        top_counts: NDArray[np.int64],
    ) -> list[Logprob]:
        """Compute the log-probability and rank of `tokens[i]` under `logits[logit_rows[i]]`.

        Each result also has the `top_counts[i]` likeliest tokens.
        """
        result = self._ops.compute_logprobs(logits, logit_rows, tokens, top_counts)
        rows = zip(
            tokens.tolist(),
            result.token_logprobs.tolist(),
            result.ranks.tolist(),
            result.top_ids.tolist(),
            result.top_logprobs.tolist(),
            top_counts.tolist(),
            strict=True,
        )
        return [
            Logprob(
                token, logprob, rank, list(zip(top_ids[:count], top_logprobs[:count], strict=True))
            )
            for token, logprob, rank, top_ids, top_logprobs, count in rows
        ]

    def _record_windows(
        self, rows: NDArray[np.int64], tokens: Tensor, offsets: NDArray[np.int64]
    ) -> None:
        """Count the valid tokens of a step with drafts, those at the same offset in their windows together."""
        if not self._penalties.active_rows[rows].any():
            return
        is_valid = tokens.cpu().numpy() >= 0
        for offset in range(int(offsets.max()) + 1):
            samples = np.flatnonzero(is_valid & (offsets == offset))
            self._penalties.record_output(rows[samples], tokens[self._to_device(samples)])

    def _build_metadata(
        self, batch_rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> SamplingMetadata:
        return SamplingMetadata(
            self._logit_scale[batch_rows],
            self._top_k[batch_rows],
            self._top_p[batch_rows],
            self._log2_min_p[batch_rows],
            uniform_random(self._seeds[batch_rows], positions),
        )

    def _apply_edits(
        self,
        edits: LogitEdits,
        batch_rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        earlier_drafts: NDArray[np.int64] | None,
    ) -> None:
        """Apply bias, allowed tokens, `min_tokens` and penalties of row `batch_rows[i]` at `positions[i]`."""
        if self._has_token_limits[batch_rows].any():
            self._apply_token_limits(edits, batch_rows)
        is_early = positions < self._min_positions[batch_rows]
        if is_early.any():
            index, ids, _ = self._early_stop_tokens.select_rows(batch_rows)
            early_pairs = self._to_device(is_early)[index]
            edits.mask_out((index[early_pairs], ids[early_pairs]))
        self._penalties.apply(edits, batch_rows, earlier_drafts)

    def _apply_masks(
        self, edits: LogitEdits, masks: TokenMasks, batch_rows: NDArray[np.int64]
    ) -> None:
        """Apply the masks first, so that all other parameters act on the allowed tokens."""
        has_logprobs = self._top_logprobs[batch_rows[masks.index]] >= 0
        edits.mask_rows(
            self._to_device(masks.index),
            masks.expand(edits.logits),
            self._to_device(masks.index[has_logprobs]),
        )

    def _apply_token_limits(self, edits: LogitEdits, rows: NDArray[np.int64]) -> None:
        """Apply the logit bias, the allowed tokens and the banned tokens."""
        index, ids, values = self._bias.select_rows(rows)
        edits.set_values((index, ids), edits.logits[index, ids] + values)
        index, ids, _ = self._allowed.select_rows(rows)
        if len(index):
            kept = edits.logits[index, ids]
            edits.mask_out((index.unique(),))
            edits.set_values((index, ids), kept)
        index, ids, _ = self._banned.select_rows(rows)
        if len(index):
            edits.mask_out((index, ids))

    def _sampled_logprobs(
        self, logits: Tensor, batch_rows: NDArray[np.int64], tokens: Tensor
    ) -> dict[int, Logprob]:
        """Compute the log-probabilities of the valid rows that requested them."""
        requested = np.flatnonzero(self._top_logprobs[batch_rows] >= 0)
        if requested.size:  # waits for the device, so only if requested
            requested = requested[tokens.cpu().numpy()[requested] >= 0]
        if not requested.size:
            return {}
        top_counts = self._top_logprobs[batch_rows[requested]]
        logprobs = self.compute_logprobs(
            logits, requested, tokens[self._to_device(requested)], top_counts
        )
        return dict(zip(requested.tolist(), logprobs, strict=True))

    def _to_device(self, values: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_random(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position), by the SplitMix64 finaliser (Steele et al. 2014).

    The seed is mixed before the position is added, so that streams of neighbouring seeds do not overlap.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
