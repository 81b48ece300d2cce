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
FRACTION = 40
"""The largest token of a row weighs 2^40: a vocabulary of 2^22 tokens cannot overflow 63 bits."""
NOTHING = -float(FRACTION + 1)
"""Weights of this exponent and below are zero."""
EXP2 = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)
"""2^x on [-1/2, 1/2] to about 2e-7, highest power first; the kernels have the same numbers."""
ROWS_AT_ONCE = 64
"""Rows that torch handles together: the integers of a row are four times its bfloat16 logits."""
NUCLEUS = 256
"""Tokens that are ordered first in search of a nucleus; eight times as many each time it is larger."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How to draw for S rows; arrays of the host."""

    scale: NDArray[np.float32]
    """[S]: log2(e) / temperature; 0 is greedy."""
    top_k: NDArray[np.int64]
    """[S]: 1 to the size of the vocabulary, which is off."""
    top_p: NDArray[np.float32]
    """[S]: of what top-k leaves; 1 is off."""
    least: NDArray[np.float32]
    """[S]: log2(min_p), at most 0; -infinity is off."""
    chance: NDArray[np.float64]
    """[S]: the random number, in [0, 1)."""

    def of(self, some: NDArray[np.int64]) -> Draws:
        """The draws of some of the rows."""
        return Draws(
            self.scale[some],
            self.top_k[some],
            self.top_p[some],
            self.least[some],
            self.chance[some],
        )


@dataclass(frozen=True, slots=True)
class Telling:
    """What a row's logits say of one token, for N rows; arrays of the host. Rows that are not sound have NaN."""

    own: NDArray[np.float64]
    """[N]: the token's log-probability."""
    ranks: NDArray[np.int64]
    """[N]: 1 + how many tokens are likelier."""
    ids: NDArray[np.int64]
    """[N, most]: the likeliest tokens; of equals the lower id comes first."""
    likeliest: NDArray[np.float64]
    """[N, most]: their log-probabilities."""


class DrawOps(Protocol):
    """What a device offers for sampling. Logits are [L, V], float32 or bfloat16, and never written to."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """For each i the token that `draws` takes from `logits[i]`: [S] int64, on the logits' device.

        The largest logit (of equals the lowest id) where greedy. Else weights are cut by top-k, by top-p of
        what is left (a token stays if the sum before it in falling order is below that part; the first
        always stays) and by min-p; the token is the first by id at which their sum exceeds chance times
        their total. -1 where logits hold NaN or infinity or nothing but -infinity.
        """
        ...

    def tell(
        self, logits: Tensor, which: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> Telling:
        """How likely `tokens[i]` is under `logits[which[i]]`, and the `counts[i]` likeliest (others: any)."""
        ...


class TorchDraws:
    """The operations on any device that torch knows."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        """See `DrawOps`."""
        parts = [torch.empty(0, dtype=torch.int64, device=logits.device)]
        for at in range(0, len(logits), ROWS_AT_ONCE):
            some = np.arange(at, min(at + ROWS_AT_ONCE, len(logits)))
            parts.append(_draw(logits[at : at + ROWS_AT_ONCE].float(), draws.of(some)))
        return torch.cat(parts)

    def tell(
        self, logits: Tensor, which: NDArray[np.int64], tokens: Tensor, counts: NDArray[np.int64]
    ) -> Telling:
        """See `DrawOps`."""
        rows = logits[torch.from_numpy(which).to(logits.device)].float()
        own = rows.gather(1, tokens[:, None])
        largest = rows.amax(-1, keepdim=True)
        masses = weigh((rows - largest) * LOG2E).sum(-1, keepdim=True)
        ids = _order(rows).topk(int(counts.max(initial=0)), -1).indices
        peaks, sums = largest.cpu().numpy(), masses.cpu().numpy()
        return Telling(
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
        total = np.log(np.maximum(masses, 1)) - FRACTION * np.log(2.0)
        result: NDArray[np.float64] = np.subtract(logits, largest, dtype=np.float64) - total
        return result


def weigh(exponents: Tensor) -> Tensor:
    """2^exponent, float32 up to 0, as int64 in units of 2^-40, rounded down; exactly 2^40 at 0."""
    y = exponents.clamp(min=NOTHING)
    whole = y.round()
    y -= whole
    power = y * EXP2[0] + EXP2[1]
    for factor in EXP2[2:]:
        power.mul_(y).add_(factor)
    bits = power.view(torch.int32)
    bits += whole.add_(FRACTION).to(torch.int32) << 23
    return power.to(torch.int64)


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """See `DrawOps.draw`, for all of `logits` [S, V] float32."""
    largest, tokens = logits.max(-1, keepdim=True)
    sampled = np.flatnonzero(draws.scale > 0)
    if sampled.size:
        index = torch.from_numpy(sampled).to(logits.device, non_blocking=True)
        chosen = _invert(logits[index], largest[index], draws.of(sampled))
        tokens[index] = chosen
    return tokens.masked_fill_(~largest.isfinite(), -1)[:, 0]


def _invert(logits: Tensor, largest: Tensor, draws: Draws) -> Tensor:
    """The token of each row at which the sum of the kept weights, by id, exceeds its part: [S, 1]."""
    exponents = (logits - largest).mul_(_column(draws.scale, logits))
    weights = weigh(exponents)
    weights.masked_fill_(exponents < _column(draws.least, logits), 0)
    cut = np.flatnonzero((draws.top_k < logits.shape[-1]) | (draws.top_p < 1.0))
    if cut.size:
        index = torch.from_numpy(cut).to(logits.device, non_blocking=True)
        last, order = _cut(logits[index], largest[index], draws.of(cut))
        weights[index] = weights[index].masked_fill_(order < last, 0)
    sums = weights.cumsum_(-1)
    total = sums[:, -1:]
    target = (_column(draws.chance, logits) * total.double()).to(torch.int64)
    found = torch.searchsorted(sums, torch.minimum(target, total - 1), right=True)
    return found.clamp_(max=logits.shape[-1] - 1)


def _cut(logits: Tensor, largest: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """The order [S, 1] of the last token that top-k and top-p keep, and the order of all, [S, V]."""
    vocab = logits.shape[-1]
    scale, top_k = _column(draws.scale, logits), _column(draws.top_k, logits)
    order = _order(logits)
    limited = draws.top_k < vocab
    size = min(vocab, max(NUCLEUS, int(draws.top_k[limited].max(initial=0))))
    whole = weigh((logits - largest) * scale).sum(-1, keepdim=True)
    while True:
        falling, ids = order.topk(size, -1)
        weights = weigh((logits.gather(1, ids) - largest) * scale)
        weights.masked_fill_(torch.arange(size, device=logits.device) >= top_k, 0)
        sums = weights.cumsum(-1)
        mass = torch.where(top_k < vocab, sums[:, -1:], whole)
        limit = (_column(draws.top_p, logits).double() * mass.double()).to(torch.int64)
        kept = (sums - weights < limit).sum(-1, keepdim=True)
        kept = torch.minimum(kept, top_k).clamp_(min=1)
        if size == vocab or bool(((kept < size) | (top_k <= size)).all()):
            return falling.gather(1, kept.clamp_(max=size) - 1), order
        size = min(size * 8, vocab)


def _order(logits: Tensor) -> Tensor:
    """Integers that rise with the logits and, for equal logits, fall with the id: [S, V] int64."""
    vocab = logits.shape[-1]
    bits = logits.add(0.0).view(torch.int32)  # adding makes -0 the 0 that it equals
    rising = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return rising.mul_(vocab).sub_(torch.arange(vocab, device=logits.device))


def _column(
    values: NDArray[np.float32] | NDArray[np.int64] | NDArray[np.float64], like: Tensor
) -> Tensor:
    return torch.from_numpy(values).to(like.device, non_blocking=True)[:, None]
