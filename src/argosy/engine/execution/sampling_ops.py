"""How a token is drawn from a row of logits and how likely it was: the definition, in plain torch.

A token's weight is 2^((logit - largest) * scale) as an integer of 40 fractional bits. Integers add up to
the same sum in any order, and every weight is made of operations that IEEE 754 rounds in one way, so that
each kernel that draws, on any device and whatever the batch, draws the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

LOG2E = 1.4426950408889634
FRACTION_BITS = 40
"""The largest token of a row weighs 2^40: a vocabulary of 2^22 tokens cannot overflow 63 bits."""
MIN_EXPONENT = -float(FRACTION_BITS + 1)
"""Weights of this exponent and below are zero."""
EXP2_COEFFICIENTS = (
    1.5403530e-4,
    1.3333558e-3,
    9.6181291e-3,
    5.5504109e-2,
    2.4022651e-1,
    6.9314718e-1,
    1.0,
)
"""2^x on [-1/2, 1/2] to about 2e-7, highest power first; the kernels have the same numbers."""
MAX_CHUNK_ROWS = 64
"""Rows that torch handles together: the integers of a row are four times its bfloat16 logits."""
INITIAL_NUCLEUS_TOKENS = 256
"""Tokens that are ordered first in search of a nucleus; eight times as many each time it is larger."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How to draw for S rows; arrays of the host."""

    logit_scale: NDArray[np.float32]
    """[S]: log2(e) / temperature; 0 is greedy."""
    top_k: NDArray[np.int64]
    """[S]: 1 to the size of the vocabulary, which is off."""
    top_p: NDArray[np.float32]
    """[S]: of what top-k leaves; 1 is off."""
    log2_min_p: NDArray[np.float32]
    """[S]: log2(min_p), at most 0; -infinity is off."""
    random_values: NDArray[np.float64]
    """[S]: the random number, in [0, 1)."""

    def select_rows(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """The draws of some of the rows."""
        return SamplingMetadata(
            self.logit_scale[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.log2_min_p[rows],
            self.random_values[rows],
        )


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """What a row's logits say of one token, for N rows; arrays of the host. Rows that are not sound have NaN."""

    token_logprobs: NDArray[np.float64]
    """[N]: the token's log-probability."""
    ranks: NDArray[np.int64]
    """[N]: 1 + how many tokens are likelier."""
    top_ids: NDArray[np.int64]
    """[N, most]: the likeliest tokens; of equals the lower id comes first."""
    top_logprobs: NDArray[np.float64]
    """[N, most]: their log-probabilities."""


class SamplingOps(Protocol):
    """What a device offers for sampling. Logits are [L, V], float32 or bfloat16, and never written to."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """For each i the token that `draws` takes from `logits[i]`: [S] int64, on the logits' device.

        The largest logit (of equals the lowest id) where greedy. Else weights are cut by top-k, by top-p of
        what is left (a token stays if the sum before it in falling order is below that part; the first
        always stays) and by min-p; the token is the first by id at which their sum exceeds chance times
        their total. -1 where logits hold NaN or infinity or nothing but -infinity.
        """
        ...

    def compute_logprobs(
        self,
        logits: Tensor,
        logit_rows: NDArray[np.int64],
        tokens: Tensor,
        top_counts: NDArray[np.int64],
    ) -> LogprobResult:
        """How likely `tokens[i]` is under `logits[which[i]]`, and the `counts[i]` likeliest (others: any)."""
        ...


class TorchSamplingOps:
    """The operations on any device that torch knows."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """See `DrawOps`."""
        parts = [torch.empty(0, dtype=torch.int64, device=logits.device)]
        for at in range(0, len(logits), MAX_CHUNK_ROWS):
            some = np.arange(at, min(at + MAX_CHUNK_ROWS, len(logits)))
            parts.append(
                _sample_rows(logits[at : at + MAX_CHUNK_ROWS].float(), metadata.select_rows(some))
            )
        return torch.cat(parts)

    def compute_logprobs(
        self,
        logits: Tensor,
        logit_rows: NDArray[np.int64],
        tokens: Tensor,
        top_counts: NDArray[np.int64],
    ) -> LogprobResult:
        """See `DrawOps`."""
        rows = logits[torch.from_numpy(logit_rows).to(logits.device)].float()
        own = rows.gather(1, tokens[:, None])
        largest = rows.amax(-1, keepdim=True)
        masses = compute_weights((rows - largest) * LOG2E).sum(-1, keepdim=True)
        ids = _sort_keys(rows).topk(int(top_counts.max(initial=0)), -1).indices
        peaks, sums = largest.cpu().numpy(), masses.cpu().numpy()
        return LogprobResult(
            log_probability(own.cpu().numpy(), peaks, sums)[:, 0],
            (rows > own).sum(-1).add_(1).cpu().numpy(),
            ids.cpu().numpy(),
            log_probability(rows.gather(1, ids).cpu().numpy(), peaks, sums),
        )


def log_probability(
    logits: NDArray[np.float32], largest: NDArray[np.float32], masses: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Natural logarithm of the probability of `logits`, given their row's largest logit and sum of weights."""
    with np.errstate(invalid="ignore", divide="ignore"):
        total = np.log(np.maximum(masses, 1)) - FRACTION_BITS * np.log(2.0)
        result: NDArray[np.float64] = np.subtract(logits, largest, dtype=np.float64) - total
        return result


def compute_weights(exponents: Tensor) -> Tensor:
    """2^exponent, float32 up to 0, as int64 in units of 2^-40, rounded down; exactly 2^40 at 0."""
    y = exponents.clamp(min=MIN_EXPONENT)
    whole = y.round()
    y -= whole
    power = y * EXP2_COEFFICIENTS[0] + EXP2_COEFFICIENTS[1]
    for factor in EXP2_COEFFICIENTS[2:]:
        power.mul_(y).add_(factor)
    bits = power.view(torch.int32)
    bits += whole.add_(FRACTION_BITS).to(torch.int32) << 23
    return power.to(torch.int64)


def _sample_rows(logits: Tensor, draws: SamplingMetadata) -> Tensor:
    """See `DrawOps.draw`, for all of `logits` [S, V] float32."""
    largest, tokens = logits.max(-1, keepdim=True)
    sampled = np.flatnonzero(draws.logit_scale > 0)
    if sampled.size:
        index = torch.from_numpy(sampled).to(logits.device, non_blocking=True)
        chosen = _select_tokens(logits[index], largest[index], draws.select_rows(sampled))
        tokens[index] = chosen
    return tokens.masked_fill_(~largest.isfinite(), -1)[:, 0]


def _select_tokens(logits: Tensor, largest: Tensor, draws: SamplingMetadata) -> Tensor:
    """The token of each row at which the sum of the kept weights, by id, exceeds its part: [S, 1]."""
    exponents = (logits - largest).mul_(_column(draws.logit_scale, logits))
    weights = compute_weights(exponents)
    weights.masked_fill_(exponents < _column(draws.log2_min_p, logits), 0)
    cut = np.flatnonzero((draws.top_k < logits.shape[-1]) | (draws.top_p < 1.0))
    if cut.size:
        index = torch.from_numpy(cut).to(logits.device, non_blocking=True)
        last, order = _nucleus_threshold(logits[index], largest[index], draws.select_rows(cut))
        weights[index] = weights[index].masked_fill_(order < last, 0)
    sums = weights.cumsum_(-1)
    total = sums[:, -1:]
    target = (_column(draws.random_values, logits) * total.double()).to(torch.int64)
    found = torch.searchsorted(sums, torch.minimum(target, total - 1), right=True)
    return found.clamp_(max=logits.shape[-1] - 1)


def _nucleus_threshold(
    logits: Tensor, largest: Tensor, draws: SamplingMetadata
) -> tuple[Tensor, Tensor]:
    """The order [S, 1] of the last token that top-k and top-p keep, and the order of all, [S, V]."""
    vocab = logits.shape[-1]
    scale, top_k = _column(draws.logit_scale, logits), _column(draws.top_k, logits)
    order = _sort_keys(logits)
    limited = draws.top_k < vocab
    size = min(vocab, max(INITIAL_NUCLEUS_TOKENS, int(draws.top_k[limited].max(initial=0))))
    whole = compute_weights((logits - largest) * scale).sum(-1, keepdim=True)
    while True:
        falling, ids = order.topk(size, -1)
        weights = compute_weights((logits.gather(1, ids) - largest) * scale)
        weights.masked_fill_(torch.arange(size, device=logits.device) >= top_k, 0)
        sums = weights.cumsum(-1)
        mass = torch.where(top_k < vocab, sums[:, -1:], whole)
        limit = (_column(draws.top_p, logits).double() * mass.double()).to(torch.int64)
        kept = (sums - weights < limit).sum(-1, keepdim=True)
        kept = torch.minimum(kept, top_k).clamp_(min=1)
        if size == vocab or bool(((kept < size) | (top_k <= size)).all()):
            return falling.gather(1, kept.clamp_(max=size) - 1), order
        size = min(size * 8, vocab)


def _sort_keys(logits: Tensor) -> Tensor:
    """Integers that rise with the logits and, for equal logits, fall with the id: [S, V] int64."""
    vocab = logits.shape[-1]
    bits = logits.add(0.0).view(torch.int32)  # adding makes -0 the 0 that it equals
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return rising.mul_(vocab).sub_(torch.arange(vocab, device=logits.device))


def _column(
    values: NDArray[np.float32] | NDArray[np.int64] | NDArray[np.float64], like: Tensor
) -> Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)[:, None]
