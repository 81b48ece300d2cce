"""What committed steps mean for clients: tokens, log-probabilities and ends, each told once."""

from __future__ import annotations

from argosy.engine.scheduling import Sequence, SequenceUpdate, StepPlan, StepResult
from argosy.engine.scheduling.step_plan import Logprob
from argosy.engine.serving.core_messages import Delta, EngineFinishReason, TokenLogprob
from argosy.protocol import BLOCK_NAME_BYTES

MAX_NAMED_BLOCKS = 1024
"""Blocks of a prompt that are named: routers look at no more of it."""


class DeltaBuilder:
    """Makes the deltas of all requests, and counts what they tell."""

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
        """Request -> prompt positions whose log-probabilities were sent."""

    def add_request(self, seq: Sequence) -> None:
        """A request was lined up."""
        self._without_delta.add(seq.id)
        if seq.params.prompt_logprobs is not None:
            self._reported_prompt_logprobs[seq.id] = 0

    def build_delta(
        self, plan: StepPlan, result: StepResult, update: SequenceUpdate
    ) -> Delta | None:
        """What one chunk means for its client; None when there is nothing to tell."""
        seq, chunk, token, finish = update
        if plan.starts[chunk] < seq.prompt_len:
            self.prompt_tokens_total += plan.counts[chunk]
        rare = finish is not None or token < 0 or result.logprobs or self._reported_prompt_logprobs
        if not rare and seq.id not in self._without_delta:  # a token and nothing else, as most are
            self.generated_tokens_total += 1
            return Delta(id=seq.id, tokens=[token])
        told = self._new_prompt_logprobs(plan, result, seq, chunk)
        if token < 0 and finish is None and not told:
            return None
        logprob = result.logprobs.get(chunk)
        if finish is not None:
            error = result.failures.get(chunk)
            return self.build_final_delta(
                seq, finish, token, logprob, prompt_logprobs=told, error=error
            )
        self.generated_tokens_total += token >= 0
        fresh = self._mark_started(seq)
        return Delta(
            id=seq.id,
            tokens=[token] if token >= 0 else [],
            logprobs=[] if logprob is None else [_to_token_logprob(logprob)],
            prompt_logprobs=told,
            cached_tokens=seq.hit_tokens if fresh else None,
            queue_s=_queue_s(seq) if fresh else None,
            prompt_block_names=self._prompt_block_names(seq) if fresh else b"",
        )

    def build_final_delta(
        self,
        seq: Sequence,
        finish_reason: EngineFinishReason,
        token: int = -1,
        logprob: Logprob | None = None,
        *,
        prompt_logprobs: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> Delta:
        """The delta that ends a request."""
        self.generated_tokens_total += token >= 0
        fresh = self._mark_started(seq)
        self._reported_prompt_logprobs.pop(seq.id, None)
        return Delta(
            id=seq.id,
            tokens=[token] if token >= 0 else [],
            logprobs=[] if logprob is None or token < 0 else [_to_token_logprob(logprob)],
            prompt_logprobs=prompt_logprobs or [],
            finish_reason=finish_reason,
            stop_token=token if finish_reason == "stop" else None,
            error=error,
            cached_tokens=seq.hit_tokens if fresh else None,
            queue_s=_queue_s(seq) if fresh else None,
            prompt_block_names=self._prompt_block_names(seq) if fresh else b"",
        )

    def _mark_started(self, seq: Sequence) -> bool:
        """Whether this is the request's first delta."""
        if seq.id in self._without_delta:
            self._without_delta.remove(seq.id)
            self.requests_started += 1
            return True
        return False

    def _prompt_block_names(self, seq: Sequence) -> bytes:
        """Of the prompt's full blocks, as far as they were hashed to be found or published."""
        full = min(seq.prompt_len // self._block_size, MAX_NAMED_BLOCKS)
        return b"".join([key[:BLOCK_NAME_BYTES] for key in seq.block_hashes[:full]])

    def _new_prompt_logprobs(
        self, plan: StepPlan, result: StepResult, seq: Sequence, chunk: int
    ) -> list[TokenLogprob]:
        """Prompt log-probabilities not sent yet (a preempted request computes some again)."""
        found = result.prompt_logprobs.get(chunk)
        told = self._reported_prompt_logprobs.get(seq.id)
        if not found or told is None:
            return []
        news = found[max(0, told - plan.starts[chunk]) :]
        self._reported_prompt_logprobs[seq.id] = max(told, plan.starts[chunk] + len(found))
        return [_to_token_logprob(logprob) for logprob in news]


def _queue_s(seq: Sequence) -> float | None:
    return None if seq.scheduled_at is None else seq.scheduled_at - seq.arrived_at


def _to_token_logprob(logprob: Logprob) -> TokenLogprob:
    return TokenLogprob(logprob.token, logprob.logprob, logprob.rank, logprob.top_logprobs)
