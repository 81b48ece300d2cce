"""Interface of the price of an engine step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class StepCost(Protocol):
    """Duration of the steps of one replica, by what they compute."""

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        """Return the duration of a step in seconds.

        Args:
            decode_rows: Sequences that decode one token each.
            context_tokens: Tokens in the KV cache of these sequences, summed.
            prefill_chunks: Tokens of each chunk of a prompt, and the tokens of its sequence in the KV cache before it.
        """
        ...
