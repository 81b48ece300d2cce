"""Interface of sampling and log-probabilities, and its reference implementation in torch.

A token's weight is 2^((logit - largest) * scale), as an integer with 40 fractional bits. Integer sums do not depend on
the order, and each weight is computed by operations whose rounding IEEE 754 defines. Therefore every kernel samples
the same tokens, on any device and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LOG2E = 1.4426950408889634
FRACTION_BITS = 40
"""Fractional bits of a weight. The largest weight is 2^40, so 2^22 tokens cannot overflow 63 bits."""
MIN_EXPONENT = -float(FRACTION_BITS + 1)
"""Largest exponent whose weight is zero."""
EXP2_COEFFICIENTS = (
    1.5403530e-4,
    1.3333558e-3,
    9.6181291e-3,
    5.5504109e-2,
    2.4022651e-1,
    6.9314718e-1,
    1.0,
)
"""Polynomial of 2^x on [-1/2, 1/2] to about 2e-7, highest power first. The kernels use the same numbers."""
MAX_CHUNK_ROWS = 64
"""Number of rows that torch samples at a time, since a row's integers take four times its bfloat16 logits."""
INITIAL_NUCLEUS_TOKENS = 256
"""Initial number of sorted tokens in the search for a nucleus, multiplied by 8 until it is large enough."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of S rows, as host arrays."""

    logit_scale: NDArray[np.float32]
    """[S], log2(e) / temperature, or 0 for greedy sampling."""
    top_k: NDArray[np.int64]
    """[S], from 1 to the vocabulary size, which disables top-k."""
    top_p: NDArray[np.float32]
    """[S], nucleus mass after top-k. 1 disables top-p."""
    log2_min_p: NDArray[np.float32]
    """[S], log2(min_p), at most 0. -infinity disables min-p."""
    random_values: NDArray[np.float64]
    """[S], random numbers in [0, 1)."""

    def select_rows(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """Return the parameters of some rows."""
        return SamplingMetadata(
            self.logit_scale[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.log2_min_p[rows],
            self.random_values[rows],
        )


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """Log-probabilities of one token in each of N rows, as host arrays. Rows with invalid logits have NaN."""

    tokens: NDArray[np.int64]
    """[N], the tokens, and 0 in place of negative ones."""
    token_logprobs: NDArray[np.float64]
    """[N], log-probability of the token."""
    ranks: NDArray[np.int64]
    """[N], 1 + the number of likelier tokens."""
    top_ids: NDArray[np.int64]
    """[N, max count], the likeliest tokens, with lower ids first among equals."""
    top_logprobs: NDArray[np.float64]
    """[N, max count], log-probabilities of `top_ids`."""


class SamplingOps(Protocol):
    """Sampling operations of a device. Logits are [L, V], float32 or bfloat16, and are not modified."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Sample a token from each row of logits.

        Greedy rows take the largest logit, and the lowest id among equals. For other rows, top-k, top-p and min-p set
        the weights of excluded tokens to zero. Top-p applies to the tokens that top-k leaves. A token stays if the sum
        of the larger weights is below the nucleus mass, and the first token always stays. The sampled token is the
        first by id at which the cumulative weight exceeds random value * total weight.

        Returns:
            Tensor [S] int64 on the logits' device. -1 where logits contain NaN or infinity, or only -infinity.
        """
        ...

    def launch_logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int64],
        top_counts: NDArray[np.int64],
    ) -> Callable[[], LogprobResult]:
        """Compute the log-probability and rank of `tokens[row]` under `logits[row]` for some rows [N].

        Tokens are [L] int64 on the logits' device. A negative one counts as token 0. The first `top_counts[i]` columns
        of a row's top arrays hold the likeliest tokens. Later columns are undefined.

        Returns:
            A function that returns the result, once an event is done that was recorded after the launch.
        """
        ...


class TorchSamplingOps:
    """Sampling operations in plain torch, on host tensors."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        parts = [torch.empty(0, dtype=torch.int64)]
        for start in range(0, len(logits), MAX_CHUNK_ROWS):
            chunk = np.arange(start, min(start + MAX_CHUNK_ROWS, len(logits)))
            parts.append(
                _sample_rows(
                    logits[start : start + MAX_CHUNK_ROWS].float(), metadata.select_rows(chunk)
                )
            )
        return torch.cat(parts)

    def launch_logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: NDArray[np.int64],
        top_counts: NDArray[np.int64],
    ) -> Callable[[], LogprobResult]:
        index = torch.from_numpy(rows)
        selected, row_tokens = logits[index].float(), tokens[index].clamp_(min=0)
        token_logits = selected.gather(1, row_tokens[:, None])
        largest = selected.amax(-1, keepdim=True)
        total_weights = compute_weights((selected - largest) * LOG2E).sum(-1, keepdim=True).numpy()
        top_ids = _sort_keys(selected).topk(int(top_counts.max(initial=0)), -1).indices
        top_logits = selected.gather(1, top_ids).numpy()
        result = LogprobResult(
            row_tokens.numpy(),
            log_probability(token_logits.numpy(), largest.numpy(), total_weights)[:, 0],
            (selected > token_logits).sum(-1).add_(1).numpy(),
            top_ids.numpy(),
            log_probability(top_logits, largest.numpy(), total_weights),
        )
        return lambda: result


def log_probability(
    logits: NDArray[np.floating],
    largest: NDArray[np.floating],
    total_weights: NDArray[np.int64] | NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the natural-log probability of `logits`, given their row's largest logit and sum of weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        log_total = np.log(np.maximum(total_weights, 1)) - FRACTION_BITS * np.log(2.0)
        result: NDArray[np.float64] = np.subtract(logits, largest, dtype=np.float64) - log_total
        return result


def compute_weights(exponents: Tensor) -> Tensor:
    """Compute 2^exponent in units of 2^-40, rounded down to int64. Exponents are float32 and at most 0.

    The weight of exponent 0 is exactly 2^40.
    """
    y = exponents.clamp(min=MIN_EXPONENT)
    whole = y.round()
    y -= whole
    power = y * EXP2_COEFFICIENTS[0] + EXP2_COEFFICIENTS[1]
    for factor in EXP2_COEFFICIENTS[2:]:
        power.mul_(y).add_(factor)
    bits = power.view(torch.int32)
    bits += whole.add_(FRACTION_BITS).to(torch.int32) << 23
    return power.to(torch.int64)


def _sample_rows(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Sample from all rows of `logits` [S, V] float32, as `SamplingOps.sample` defines."""
    largest, tokens = logits.max(-1, keepdim=True)
    sampled = np.flatnonzero(metadata.logit_scale > 0)
    if sampled.size:
        index = torch.from_numpy(sampled)
        selected = _select_tokens(logits[index], largest[index], metadata.select_rows(sampled))
        tokens[index] = selected
    return tokens.masked_fill_(~largest.isfinite(), -1)[:, 0]


def _select_tokens(logits: Tensor, largest: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Return [S, 1], the token of each row at which the cumulative weight by id exceeds its target."""
    exponents = (logits - largest).mul_(_column(metadata.logit_scale))
    weights = compute_weights(exponents)
    weights.masked_fill_(exponents < _column(metadata.log2_min_p), 0)
    limited = np.flatnonzero((metadata.top_k < logits.shape[-1]) | (metadata.top_p < 1.0))
    if limited.size:
        index = torch.from_numpy(limited)
        threshold, sort_keys = _nucleus_threshold(
            logits[index], largest[index], metadata.select_rows(limited)
        )
        weights[index] = weights[index].masked_fill_(sort_keys < threshold, 0)
    sums = weights.cumsum_(-1)
    total = sums[:, -1:]
    target = (_column(metadata.random_values) * total.double()).to(torch.int64)
    found = torch.searchsorted(sums, torch.minimum(target, total - 1), right=True)
    return found.clamp_(max=logits.shape[-1] - 1)


def _nucleus_threshold(
    logits: Tensor, largest: Tensor, metadata: SamplingMetadata
) -> tuple[Tensor, Tensor]:
    """Return the sort key [S, 1] of the last token that top-k and top-p keep, and all sort keys [S, V]."""
    vocab = logits.shape[-1]
    scale, top_k = _column(metadata.logit_scale), _column(metadata.top_k)
    sort_keys = _sort_keys(logits)
    has_top_k = metadata.top_k < vocab
    size = min(vocab, max(INITIAL_NUCLEUS_TOKENS, int(metadata.top_k[has_top_k].max(initial=0))))
    total_weight = compute_weights((logits - largest) * scale).sum(-1, keepdim=True)
    while True:
        top_keys, ids = sort_keys.topk(size, -1)
        weights = compute_weights((logits.gather(1, ids) - largest) * scale)
        weights.masked_fill_(torch.arange(size) >= top_k, 0)
        sums = weights.cumsum(-1)
        total = torch.where(top_k < vocab, sums[:, -1:], total_weight)
        target = (_column(metadata.top_p).double() * total.double()).to(torch.int64)
        num_kept = (sums - weights < target).sum(-1, keepdim=True)
        num_kept = torch.minimum(num_kept, top_k).clamp_(min=1)
        if size == vocab or bool(((num_kept < size) | (top_k <= size)).all()):
            return top_keys.gather(1, num_kept.clamp_(max=size) - 1), sort_keys
        size = min(size * 8, vocab)


def _sort_keys(logits: Tensor) -> Tensor:
    """Return integers [S, V] int64 that rise with the logits and, for equal logits, fall with the id."""
    vocab = logits.shape[-1]
    bits = logits.add(0.0).view(torch.int32)  # adding 0 turns -0 into 0, because they are equal
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return rising.mul_(vocab).sub_(torch.arange(vocab))


def _column(
    values: NDArray[np.float32] | NDArray[np.int64] | NDArray[np.float64],
) -> Tensor:
    return torch.from_numpy(values)[:, None]
