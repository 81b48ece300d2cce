"""Delta builder: converts committed steps to deltas, so that each token and log-probability is sent once."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from argosy.engine.scheduling import (
    Logprob,
    Sequence,
    SequenceFailure,
    SequenceUpdate,
    StepPlan,
    StepResult,
)
from argosy.engine.serving.core_messages import Delta, EngineFinishReason
from argosy.protocol import BLOCK_NAME_BYTES

MAX_NAMED_BLOCKS = 1024
"""Maximum number of prompt blocks that are named. Routers use no more of them."""


class DeltaBuilder:
    """Builds the deltas of all requests and counts the tokens in them."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.requests_started = 0
        """Requests that have had their first delta."""
        self.prompt_tokens_total = 0
        """Prompt tokens computed."""
        self.generated_tokens_total = 0
        self._without_delta: set[str] = set()
        """Requests that have had no delta yet."""
        self._reported_prompt_logprobs: dict[str, int] = {}
        """Number of prompt positions whose log-probabilities were sent, by request id."""

    def add_request(self, seq: Sequence) -> None:
        """Register a queued request."""
        self._without_delta.add(seq.id)
        if seq.params.prompt_logprobs is not None:
            self._reported_prompt_logprobs[seq.id] = 0

    def build_delta(
        self, plan: StepPlan, result: StepResult, update: SequenceUpdate
    ) -> Delta | None:
        """Build the delta for one chunk of a step. Returns None if the chunk has nothing to report."""
        seq, chunk, tokens, finish_reason = update
        if plan.starts[chunk] < seq.prompt_len:
            self.prompt_tokens_total += plan.counts[chunk]
        needs_full_delta = (
            finish_reason is not None
            or not tokens
            or result.logprobs
            or self._reported_prompt_logprobs
        )
        # fast path for tokens and nothing else
        if not needs_full_delta and seq.id not in self._without_delta:
            self.generated_tokens_total += len(tokens)
            return Delta(id=seq.id, tokens=tokens, accepted_drafts=len(tokens) - 1)
        prompt_logprobs = self._new_prompt_logprobs(plan, result, seq, chunk)
        if not tokens and finish_reason is None and not prompt_logprobs:
            return None
        return self.build_full_delta(
            seq,
            finish_reason,
            tokens,
            result.logprobs.get(chunk, ()),
            prompt_logprobs=prompt_logprobs,
            failure=result.failures.get(chunk),
            pooled=result.pooled.get(chunk, b""),
        )

    def build_full_delta(
        self,
        seq: Sequence,
        finish_reason: EngineFinishReason | None,
        tokens: list[int] | None = None,
        logprobs: Iterable[Logprob] = (),
        *,
        prompt_logprobs: list[Logprob] | None = None,
        failure: SequenceFailure | None = None,
        pooled: bytes = b"",
    ) -> Delta:
        """Build a delta that has more than tokens, such as the first one of a request and the one that ends it.

        Of `logprobs`, those of `tokens` are used. The step may have sampled more tokens.
        """
        tokens = tokens or []
        self.generated_tokens_total += len(tokens)
        is_first = self._mark_started(seq)
        if finish_reason is not None:
            self._reported_prompt_logprobs.pop(seq.id, None)
        return Delta(
            id=seq.id,
            tokens=tokens,
            logprobs=list(islice(logprobs, len(tokens))),
            prompt_logprobs=prompt_logprobs or [],
            finish_reason=finish_reason,
            stop_token=tokens[-1] if finish_reason == "stop" else None,
            error=None if failure is None else failure.message,
            cached_tokens=seq.hit_tokens if is_first else None,
            queue_s=_queue_s(seq) if is_first else None,
            prompt_block_names=self._prompt_block_names(seq) if is_first else b"",
            error_code=None if failure is None else failure.code,
            pooled=pooled,
            accepted_drafts=max(0, len(tokens) - 1),
        )

    def _mark_started(self, seq: Sequence) -> bool:
        """Return whether this is the request's first delta, and record it."""
        if seq.id in self._without_delta:
            self._without_delta.remove(seq.id)
            self.requests_started += 1
            return True
        return False

    def _prompt_block_names(self, seq: Sequence) -> bytes:
        """Return the names of the prompt's full blocks, as far as their hashes were computed."""
        full = min(seq.prompt_len // self._block_size, MAX_NAMED_BLOCKS)
        return b"".join([key[:BLOCK_NAME_BYTES] for key in seq.block_hashes[:full]])

    def _new_prompt_logprobs(
        self, plan: StepPlan, result: StepResult, seq: Sequence, chunk: int
    ) -> list[Logprob]:
        """Return prompt log-probabilities that were not sent yet. A preempted request computes some of them again."""
        computed = result.prompt_logprobs.get(chunk)
        reported = self._reported_prompt_logprobs.get(seq.id)
        if not computed or reported is None:
            return []
        self._reported_prompt_logprobs[seq.id] = max(reported, plan.starts[chunk] + len(computed))
        return computed[max(0, reported - plan.starts[chunk]) :]


def _queue_s(seq: Sequence) -> float | None:
    return None if seq.scheduled_at is None else seq.scheduled_at - seq.arrived_at
