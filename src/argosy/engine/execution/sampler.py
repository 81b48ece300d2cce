"""From logits to the next tokens, for all rows at once; each row's result depends on that row alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from argosy.engine.execution.randomness import uniform
from argosy.engine.execution.tables import RaggedTable
from argosy.engine.scheduling import Logprob

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from argosy.engine.scheduling import Admission

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What `Sampler` drew for S rows."""

    tokens: Tensor
    """[S] int64."""
    logprobs: dict[int, Logprob]
    """By batch index, for the rows that asked."""
    invalid: list[int]
    """Batch indices whose logits were not finite."""


class Sampler:
    """The sampling parameters of R rows, and the counts that penalties need."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._rows = rows
        self._temperature = np.zeros(rows, np.float32)
        self._top_k = np.zeros(rows, np.int64)
        self._top_p = np.ones(rows, np.float32)
        self._min_p = np.zeros(rows, np.float32)
        self._repetition = np.ones(rows, np.float32)
        self._presence = np.zeros(rows, np.float32)
        self._frequency = np.zeros(rows, np.float32)
        self._seeds = np.zeros(rows, np.uint64)
        self._penalised = np.zeros(rows, bool)
        self._min_positions = np.zeros(rows, np.int64)
        self._top_logprobs = np.full(rows, -1, np.int64)
        self._bias = RaggedTable(rows, device)
        self._allowed = RaggedTable(rows, device)
        self._barred = RaggedTable(rows, device)
        """Tokens that may not come before `min_tokens`."""
        self._counts: Tensor | None = None
        """[R, V] int32: how often each token was output; allocated when a penalty is first used."""
        self._seen: Tensor | None = None
        """[R, V] bool: tokens of the prompt."""

    def admit(self, admission: Admission, ends: list[int]) -> None:
        """Take over a row; `ends` are the tokens that may not be sampled before `min_tokens`."""
        row, params = admission.row, admission.params
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k if 0 < params.top_k < self._vocab else 0
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._seeds[row] = np.uint64(params.seed or 0)
        self._min_positions[row] = admission.prompt_len + params.min_tokens
        self._top_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self._bias.set(row, list(params.logit_bias), list(params.logit_bias.values()))
        allowed = list(params.allowed_token_ids)
        self._allowed.set(row, allowed, [0.0] * len(allowed))
        barred = ends if params.min_tokens > 0 else []
        self._barred.set(row, barred, [0.0] * len(barred))
        self._penalised[row] = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        if self._penalised[row]:
            self._count(row, admission.tokens, admission.prompt_len)

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Sampled:
        """Draw the token at `positions[i]` for `rows[i]` from `logits[i]` ([S, V] float32, overwritten)."""
        where = rows.cpu().numpy()
        finite = torch.isfinite(logits.sum(dim=-1))
        invalid: list[int] = []
        if not bool(finite.all()):
            invalid = torch.nonzero(~finite).flatten().tolist()
            logits[invalid] = 0.0
        asked = np.flatnonzero(self._top_logprobs[where] >= 0)
        raw = torch.log_softmax(logits[asked], dim=-1) if asked.size else None
        self._restrict(logits, rows, positions)
        self._penalise(logits, rows, where)
        tokens = self._draw(logits, where, positions.cpu().numpy())
        if self._penalised[where].any():
            self._record(rows, where, tokens)
        logprobs: dict[int, Logprob] = {}
        if raw is not None:
            tops = [int(k) for k in self._top_logprobs[where[asked]]]
            found = describe(raw, tokens[torch.from_numpy(asked)], tops)
            logprobs = dict(zip(asked.tolist(), found, strict=True))
        return Sampled(tokens, logprobs, invalid)

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

    def _penalise(self, logits: Tensor, rows: Tensor, where: NDArray[np.int64]) -> None:
        """Repetition penalty over prompt and output; presence and frequency penalties over output."""
        some = np.flatnonzero(self._penalised[where])
        if not some.size or self._counts is None or self._seen is None:
            return
        index = torch.from_numpy(some).to(self._device)
        which = rows[index]
        part, counts = logits[index], self._counts[which]
        repetition = self._column(self._repetition, where[some])
        seen = self._seen[which] | (counts > 0)
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= self._column(self._frequency, where[some]) * counts
        part -= self._column(self._presence, where[some]) * (counts > 0)
        logits[index] = part

    def _draw(
        self, logits: Tensor, where: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Tensor:
        """Greedy rows take the likeliest token, the others invert their cumulative distribution."""
        tokens = logits.argmax(dim=-1)
        temperature = self._temperature[where]
        ordered = (self._top_k[where] > 0) | (self._top_p[where] < 1.0)
        for group, sort in ((ordered, True), (~ordered, False)):
            some = np.flatnonzero((temperature > 0) & group)
            if not some.size:
                continue
            index = torch.from_numpy(some).to(self._device)
            scaled = logits[index] / self._column(self._temperature, where[some])
            chance = torch.from_numpy(uniform(self._seeds[where[some]], positions[some]))
            if sort:
                scaled, ids = self._head(scaled, where[some])
            probs = self._above_min_p(torch.softmax(scaled, dim=-1), where[some])
            cumulative = probs.double().cumsum(dim=-1)
            target = chance.to(self._device)[:, None] * cumulative[:, -1:]
            pick = torch.searchsorted(cumulative, target, right=True)
            pick.clamp_(max=probs.shape[-1] - 1)
            tokens[index] = (ids.gather(1, pick) if sort else pick).squeeze(1)
        return tokens

    def _head(self, scaled: Tensor, which: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Top-k, then top-p of what is left: (logits in falling order with the rest at -inf, their ids)."""
        falling, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
        top_k = self._top_k[which]
        most = np.where(top_k > 0, top_k, self._vocab)
        place = torch.arange(self._vocab, device=self._device)
        falling = falling.masked_fill(place >= self._column(most, None), NEG_INF)
        probs = torch.softmax(falling, dim=-1)
        before = probs.cumsum(dim=-1) - probs
        top_p = self._column(self._top_p, which)
        # The likeliest token always stays, and top_p = 1 cuts nothing however the sum was rounded.
        cut = (before >= top_p) & (place > 0) & (top_p < 1.0)
        return falling.masked_fill(cut, NEG_INF), ids

    def _above_min_p(self, probs: Tensor, which: NDArray[np.int64]) -> Tensor:
        """Drop the tokens less likely than min_p times the likeliest."""
        if not self._min_p[which].any():
            return probs
        least = self._column(self._min_p, which) * probs.amax(dim=-1, keepdim=True)
        return probs.masked_fill(probs < least, 0.0)

    def _count(self, row: int, tokens: list[int], prompt_len: int) -> None:
        if self._counts is None or self._seen is None:
            shape = (self._rows, self._vocab)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        ids = torch.tensor(tokens, device=self._device)
        self._seen[row] = False
        self._seen[row, ids[:prompt_len]] = True
        self._counts[row] = torch.bincount(ids[prompt_len:], minlength=self._vocab)

    def _record(self, rows: Tensor, where: NDArray[np.int64], tokens: Tensor) -> None:
        if self._counts is not None:
            index = torch.from_numpy(np.flatnonzero(self._penalised[where])).to(self._device)
            self._counts[rows[index], tokens[index]] += 1

    def _column(
        self,
        values: NDArray[np.float32] | NDArray[np.int64],
        which: NDArray[np.int64] | None,
    ) -> Tensor:
        chosen = values if which is None else values[which]
        return torch.from_numpy(chosen).to(self._device)[:, None]


def describe(logprobs: Tensor, tokens: Tensor, tops: list[int]) -> list[Logprob]:
    """Log-probability and rank of `tokens[i]` under `logprobs[i]` ([N, V]), and the `tops[i]` likeliest."""
    own = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    ids = _likeliest(logprobs, max(*tops, 1))
    values = logprobs.gather(1, ids)
    rows = zip(
        tokens.tolist(),
        own[:, 0].tolist(),
        ranks.tolist(),
        ids.tolist(),
        values.tolist(),
        tops,
        strict=True,
    )
    return [
        Logprob(token, lp, rank, list(zip(likeliest[:k], theirs[:k], strict=True)))
        for token, lp, rank, likeliest, theirs, k in rows
    ]


def _likeliest(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the `count` likeliest tokens of each row, [N, count]; of equals the lower id comes first."""
    vocab = logprobs.shape[-1]
    falling = torch.arange(vocab - 1, -1, -1, device=logprobs.device)
    magnitude = logprobs.view(torch.int32).bitwise_and(0x7FFFFFFF).to(torch.int64)
    return (falling - magnitude * vocab).topk(min(count, vocab), dim=-1).indices
