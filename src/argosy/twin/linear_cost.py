"""Price of a step that is linear in what it computes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class LinearStepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Duration that is linear in what a step computes. Implements `StepCost`.

    The defaults are those of Qwen2.5-0.5B in bf16 on two CPU cores (`benchmarks/results/2026-11-21-engine-all.json`).
    Workload W2 has 27.5 ms for each output token and 259 ms for a prompt of 256 tokens. The attention is computed from
    the shape, with 77 % of 46.6 GB/s and 70 % of 0.9 TFLOP/s.
    """

    step_s: float = 0.0266
    """Time of each step, in which all weights are read."""
    token_s: float = 0.000908
    """Time of each token."""
    context_token_s: float = 3.4e-7
    """Time to read the keys and values of one token that a decode attends to."""
    pair_s: float = 1.4e-7
    """Time for each pair of a token of a prompt and a token that it attends to."""

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        seconds = self.step_s + self.token_s * decode_rows + self.context_token_s * context_tokens
        for tokens, context in prefill_chunks:
            seconds += self.token_s * tokens + self.pair_s * tokens * (context + tokens / 2)
        return seconds
