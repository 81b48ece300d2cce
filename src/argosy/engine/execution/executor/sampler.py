"""Sampler of the next tokens for all rows at once. Each row's result depends only on that row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.execution.executor.draft_windows import DraftWindows
from argosy.engine.execution.kernels.torch.logit_edits import (
    LogitSampler,
    RowEdits,
    StepEdits,
    TokenMasks,
)
from argosy.engine.execution.kernels.torch.sampling_ops import LOG2E, SamplingMetadata
from argosy.engine.grammar import is_constrained
from argosy.engine.scheduling import AdmittedSequence, Logprob

NEG_INF = float("-inf")
MAX_LOGIT_SCALE = float(np.finfo(np.float32).max)


class Sampler:
    """Sampling parameters of R rows. The edits of their logits are state of `logit_sampler`."""

    def __init__(self, rows: int, vocab_size: int, logit_sampler: LogitSampler) -> None:
        self._vocab_size = vocab_size
        self._logit_sampler = logit_sampler
        self._logit_scale = np.zeros(rows, np.float32)
        self._top_k = np.full(rows, vocab_size, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._log2_min_p = np.full(rows, NEG_INF, np.float32)
        self._seeds = np.zeros(rows, np.uint64)
        self._min_positions = np.zeros(rows, np.int64)
        self._top_logprobs = np.full(rows, -1, np.int64)

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
        if is_constrained(params):
            edits = RowEdits(params.logit_bias, (), (), ())
        else:
            edits = RowEdits(
                params.logit_bias,
                params.allowed_token_ids or (),
                params.banned_token_ids,
                end_token_ids if params.min_tokens > 0 else (),
            )
        self._logit_sampler.admit(admission, edits)

    def __call__(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        masks: TokenMasks | None = None,
        windows: DraftWindows | None = None,
        failed_samples: Iterable[int] = (),
    ) -> tuple[Tensor, Callable[[Sequence[int]], dict[int, Logprob]]]:
        """Sample the token at `positions[i]` for `rows[i]` from `logits[i]`.

        Logits [S, V] float32 are edited in place, because a copy would cost more than sampling. Only those of rows with
        log-probabilities are restored for sure. Rows and positions are in host memory, which avoids waiting for the
        device. In a step with drafts, a row occurs once for each sample of its `windows`.

        Returns:
            Tokens [S] int64 on the device. A token is -1 if the logits were not finite, or if `DraftWindows.reject`
            rejects it. And a function that returns the log-probabilities under the unmodified logits, by batch index,
            for valid rows that requested them. It takes the tokens on the host, and may be called once an event is done
            that was recorded after the call.
        """
        has_logprobs = self._top_logprobs[rows] >= 0
        step = StepEdits(
            rows,
            positions < self._min_positions[rows],
            has_logprobs,
            masks,
            None if windows is None else windows.earlier_drafts,
            None if windows is None else windows.offsets,
        )
        tokens = self._logit_sampler.sample(logits, self._build_metadata(rows, positions), step)
        if windows is not None:
            tokens = windows.reject(tokens, failed_samples)
        self._logit_sampler.record_output(step, tokens)
        requested = np.flatnonzero(has_logprobs)
        if not requested.size:
            return tokens, _no_logprobs
        read = self.launch_logprobs(logits, tokens, requested, self._top_logprobs[rows[requested]])

        def read_valid(sampled: Sequence[int]) -> dict[int, Logprob]:
            pairs = zip(requested.tolist(), read(), strict=True)
            return {sample: logprob for sample, logprob in pairs if sampled[sample] >= 0}

        return tokens, read_valid

    def launch_logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int64],
        top_counts: NDArray[np.int64],
    ) -> Callable[[], list[Logprob]]:
        """Compute the log-probabilities and ranks of `tokens[row]` under `logits[row]` for some rows.

        Each result also has the `top_counts[i]` likeliest tokens. The returned function may be called once an event is
        done that was recorded after the call.
        """
        read = self._logit_sampler.ops.launch_logprobs(logits, tokens, rows, top_counts)

        def read_list() -> list[Logprob]:
            result = read()
            columns = zip(
                result.tokens.tolist(),
                result.token_logprobs.tolist(),
                result.ranks.tolist(),
                result.top_ids.tolist(),
                result.top_logprobs.tolist(),
                top_counts.tolist(),
                strict=True,
            )
            return [
                Logprob(token, logprob, rank, list(zip(ids[:count], logprobs[:count], strict=True)))
                for token, logprob, rank, ids, logprobs, count in columns
            ]

        return read_list

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


def _no_logprobs(_sampled: Sequence[int]) -> dict[int, Logprob]:
    return {}


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
