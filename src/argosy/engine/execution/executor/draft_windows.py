"""Windows of a step with drafts: which of its sampled tokens are those that steps without drafts would sample.

The token after a draft is valid if the draft equals the token that was sampled before it, because all inputs are then
those of a step without drafts. A window therefore ends at its first token that differs from its draft. That token is
valid, too, because no draft after it was used.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from argosy.engine.scheduling import StepPlan

NO_DRAFT = -1
"""Padding of draft tokens, and what is in place of a sampled token that is not valid."""


class DraftWindows:
    """Windows of the chunks of one step that sample. S samples in all, up to K drafts in a window."""

    def __init__(self, plan: StepPlan) -> None:
        self._chunks = [chunk for chunk, count in enumerate(plan.sample_counts) if count]
        self.drafts: list[list[int]] = [plan.draft_tokens.get(chunk, []) for chunk in self._chunks]
        """Drafts of each window. Empty for a window of one sample."""
        sizes = np.fromiter((1 + len(drafts) for drafts in self.drafts), np.int64)
        self._firsts = (sizes.cumsum() - sizes).tolist()
        """First sample of each window."""
        self.offsets: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(self._firsts, sizes)
        """[S], number of drafts before each sample in its window."""
        self.earlier_drafts: NDArray[np.int64] = np.full(
            (len(self.offsets), max(map(len, self.drafts), default=0)), NO_DRAFT
        )
        """[S, K], these drafts, and then padding."""
        for first, drafts in zip(self._firsts, self.drafts, strict=True):
            for offset in range(1, 1 + len(drafts)):
                self.earlier_drafts[first + offset, :offset] = drafts[:offset]

    def reject(self, tokens: Tensor, failed_samples: Iterable[int]) -> Tensor:
        """Return sampled tokens [S] with `NO_DRAFT` for those that are not valid. Waits for the device.

        A sample that failed, or has a negative token, ends its window before it.
        """
        sampled: list[int] = tokens.tolist()
        for sample in failed_samples:
            sampled[sample] = NO_DRAFT
        for first, drafts in zip(self._firsts, self.drafts, strict=True):
            end = first + 1 + len(drafts)
            position = first
            while position < end and sampled[position] >= 0:
                position += 1
                if position < end and sampled[position - 1] != drafts[position - 1 - first]:
                    break
            sampled[position:end] = [NO_DRAFT] * (end - position)
        return torch.tensor(sampled, device=tokens.device)

    def samples_by_chunk(self) -> dict[int, range]:
        """Return the samples of each chunk that has any."""
        return {
            chunk: range(first, first + 1 + len(drafts))
            for chunk, first, drafts in zip(self._chunks, self._firsts, self.drafts, strict=True)
        }
