"""From logits to the next tokens, for all rows at once; each row's result depends on that row alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.draws import LOG2E, DrawOps, Draws, TorchDraws
from argosy.engine.execution.draws_cpu import cpu_draws
from argosy.engine.execution.penalties import Penalties
from argosy.engine.execution.randomness import uniform
from argosy.engine.execution.tables import RaggedTable
from argosy.engine.scheduling import Logprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.scheduling import Admission

NEG_INF = float("-inf")
STEEPEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `Sampler` drew for S rows."""

    tokens: Tensor
    """[S] int64, on the device; -1 for rows whose logits were not finite."""
    logprobs: dict[int, Logprob]
    """By batch index, for the valid rows that asked; of the logits as the model gave them."""

    @property
    def invalid(self) -> list[int]:
        """Batch indices whose logits were not finite; waits for the device."""
        found: list[int] = torch.nonzero(self.tokens < 0).flatten().tolist()
        return found


class Sampler:
    """The sampling parameters of R rows, and the counts that penalties need."""

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device, ops: DrawOps | None = None
    ) -> None:
        self._vocab = vocab_size
        self._device = device
        self._ops = ops or draws_for(device)
        self._scale = np.zeros(rows, np.float32)
        self._top_k = np.full(rows, vocab_size, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._least = np.full(rows, NEG_INF, np.float32)
        self._seeds = np.zeros(rows, np.uint64)
        self._min_positions = np.zeros(rows, np.int64)
        self._top_logprobs = np.full(rows, -1, np.int64)
        self._restricted = np.zeros(rows, bool)
        """Rows with a logit bias or allowed tokens."""
        self._penalties = Penalties(rows, vocab_size, device)
        self._scratch = torch.empty(0, vocab_size, device=device)
        self._bias = RaggedTable(rows, device)
        self._allowed = RaggedTable(rows, device)
        self._barred = RaggedTable(rows, device)
        """Tokens that may not come before `min_tokens`."""

    def admit(self, admission: Admission, ends: list[int]) -> None:
        """Take over a row; `ends` are the tokens that may not be sampled before `min_tokens`."""
        row, params = admission.row, admission.params
        heat = params.temperature
        self._scale[row] = min(LOG2E / heat, STEEPEST) if heat > 0 else 0.0
        self._top_k[row] = min(params.top_k, self._vocab) if params.top_k > 0 else self._vocab
        self._top_p[row] = params.top_p
        self._least[row] = math.log2(params.min_p) if params.min_p > 0 else NEG_INF
        self._seeds[row] = np.uint64(params.seed or 0)
        self._min_positions[row] = admission.prompt_len + params.min_tokens
        self._top_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias.set(row, list(params.logit_bias), list(params.logit_bias.values()))
        allowed = list(params.allowed_token_ids)
        self._allowed.set(row, allowed, [0.0] * len(allowed))
        self._restricted[row] = bool(params.logit_bias) or bool(allowed)
        barred = ends if params.min_tokens > 0 else []
        self._barred.set(row, barred, [0.0] * len(barred))
        self._penalties.admit(admission)

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Sampled:
        """Draw the token at `positions[i]` for `rows[i]` from `logits[i]` ([S, V], left as they are).

        rows, positions: [S] int64, in host memory, so that nobody waits for the device to tell them.
        """
        where, places = rows.numpy(), positions.numpy()
        draws = self._draws(where, places)
        edited = self._restricted[where] | self._penalties.active[where]
        edited |= places < self._min_positions[where]
        plain = np.flatnonzero(~edited)
        tokens = self._ops.draw(logits, plain, draws.of(plain) if edited.any() else draws)
        if edited.any():
            some = np.flatnonzero(edited)
            drawn = self._draw_edited(logits, some, where[some], places[some], draws.of(some))
            tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device).index_copy_(
                0, self._index(plain), tokens
            )
            tokens.index_copy_(0, self._index(some), drawn)
        self._penalties.record(where, tokens)
        return Sampled(tokens, self._tell(logits, where, tokens))

    def describe(self, logits: Tensor, tokens: Tensor, top: int) -> list[Logprob]:
        """Log-probability and rank of `tokens[i]` under `logits[i]` ([N, V]), and the `top` likeliest."""
        which = np.arange(len(tokens))
        return describe(self._ops, logits, which, tokens, np.full(len(which), top, np.int64))

    def _draws(self, where: NDArray[np.int64], positions: NDArray[np.int64]) -> Draws:
        return Draws(
            self._scale[where],
            self._top_k[where],
            self._top_p[where],
            self._least[where],
            uniform(self._seeds[where], positions),
        )

    def _draw_edited(
        self,
        logits: Tensor,
        some: NDArray[np.int64],
        which: NDArray[np.int64],
        places: NDArray[np.int64],
        draws: Draws,
    ) -> Tensor:
        """Draw for `which[i]` at `places[i]` from `logits[some[i]]`, changed as that row asks."""
        part = self._copy(logits, some)
        sound = part.amax(-1) < float("inf")  # asked now: what is changed may hide a NaN
        self._restrict(part, self._index(which), self._index(places))
        self._penalties.apply(part, which)
        return torch.where(sound, self._ops.draw(part, np.arange(len(some)), draws), -1)

    def _copy(self, logits: Tensor, some: NDArray[np.int64]) -> Tensor:
        """The rows `some` in float32, where such copies always go: fresh pages cost more than the copying."""
        if len(self._scratch) < len(some):
            shape = (len(some), self._vocab)
            self._scratch = torch.empty(shape, dtype=torch.float32, device=self._device)
        part = self._scratch[: len(some)]
        if logits.dtype == part.dtype:
            return torch.index_select(logits, 0, self._index(some), out=part)
        return part.copy_(logits[self._index(some)])

    def _restrict(self, logits: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Logit bias, allowed tokens, and no end before `min_tokens`."""
        if self._bias:
            index, ids, values = self._bias.pick(rows)
            logits.index_put_((index, ids), values, accumulate=True)
        if self._allowed:
            index, ids, _ = self._allowed.pick(rows)
            kept = logits[index, ids]
            logits[index.unique()] = NEG_INF
            logits[index, ids] = kept
        if self._barred:
            index, ids, _ = self._barred.pick(rows)
            least = torch.from_numpy(self._min_positions).to(self._device)[rows]
            early = (positions < least)[index]
            logits[index[early], ids[early]] = NEG_INF

    def _tell(self, logits: Tensor, where: NDArray[np.int64], tokens: Tensor) -> dict[int, Logprob]:
        """The log-probabilities of the valid rows that asked."""
        asked = np.flatnonzero(self._top_logprobs[where] >= 0)
        if asked.size:  # only now it is worth waiting for the device
            asked = asked[tokens.cpu().numpy()[asked] >= 0]
        if not asked.size:
            return {}
        tops = self._top_logprobs[where[asked]]
        found = describe(self._ops, logits, asked, tokens[self._index(asked)], tops)
        return dict(zip(asked.tolist(), found, strict=True))

    def _index(self, some: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(some).to(self._device, non_blocking=True)


def draws_for(device: torch.device) -> DrawOps:
    """The operations for a device; on the CPU with the calling thread's number of torch threads."""
    return cpu_draws(torch.get_num_threads()) if device.type == "cpu" else TorchDraws()


def describe(
    ops: DrawOps,
    logits: Tensor,
    which: NDArray[np.int64],
    tokens: Tensor,
    tops: NDArray[np.int64],
) -> list[Logprob]:
    """Log-probability and rank of `tokens[i]` under `logits[which[i]]`, and the `tops[i]` likeliest."""
    told = ops.tell(logits, which, tokens, tops)
    rows = zip(
        tokens.tolist(),
        told.own.tolist(),
        told.ranks.tolist(),
        told.ids.tolist(),
        told.likeliest.tolist(),
        tops.tolist(),
        strict=True,
    )
    return [
        Logprob(token, lp, rank, list(zip(likeliest[:k], theirs[:k], strict=True)))
        for token, lp, rank, likeliest, theirs, k in rows
    ]
