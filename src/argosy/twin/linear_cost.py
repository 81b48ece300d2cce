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
    sequence_s: float = 0.0
    """Time of each sequence, beside that of its tokens."""

    def step_seconds(
        self,
        decode_rows: int,
        context_tokens: float,
        prefill_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        seconds = self.step_s + self.token_s * decode_rows + self.context_token_s * context_tokens
        seconds += self.sequence_s * (decode_rows + len(prefill_chunks))
        for tokens, context in prefill_chunks:
            seconds += self.token_s * tokens + self.pair_s * tokens * (context + tokens / 2)
        return seconds


def count_linear_work(
    decode_rows: int, context_tokens: float, prefill_chunks: Sequence[tuple[int, int]]
) -> tuple[float, ...]:
    """Return how often a step has each price of `LinearStepCost`, in the order of its fields."""
    pairs = 0.0
    tokens = decode_rows
    for count, context in prefill_chunks:
        tokens += count
        pairs += count * (context + count / 2)
    return 1.0, tokens, context_tokens, pairs, decode_rows + len(prefill_chunks)
