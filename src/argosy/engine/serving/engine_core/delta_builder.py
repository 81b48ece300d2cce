"""What committed steps mean for clients: tokens, log-probabilities and ends, each told once."""

from __future__ import annotations

from argosy.engine.scheduling import Plan, Progress, Sequence, StepResult
from argosy.engine.scheduling.step_plan import Logprob
from argosy.engine.serving.core_messages import Delta, FinishReason, TokenLogprob
from argosy.protocol import NAME_BYTES

MOST_NAMED = 1024
"""Blocks of a prompt that are named: routers look at no more of it."""


class Deltas:
    """Makes the deltas of all requests, and counts what they tell."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.begun = 0
        """Requests that have had their first delta."""
        self.prompt_tokens = 0
        """Prompt tokens computed."""
        self.generated_tokens = 0
        self._fresh: set[str] = set()
        """Requests that have had no delta yet."""
        self._prompt_told: dict[str, int] = {}
        """Request -> prompt positions whose log-probabilities were sent."""

    def enter(self, seq: Sequence) -> None:
        """A request was lined up."""
        self._fresh.add(seq.id)
        if seq.params.prompt_logprobs is not None:
            self._prompt_told[seq.id] = 0

    def of(self, plan: Plan, result: StepResult, item: Progress) -> Delta | None:
        """What one chunk means for its client; None when there is nothing to tell."""
        seq, chunk, token, finish = item
        if plan.starts[chunk] < seq.prompt_len:
            self.prompt_tokens += plan.counts[chunk]
        rare = finish is not None or token < 0 or result.logprobs or self._prompt_told
        if not rare and seq.id not in self._fresh:  # a token and nothing else, as most are
            self.generated_tokens += 1
            return Delta(id=seq.id, tokens=[token])
        told = self._prompt_news(plan, result, seq, chunk)
        if token < 0 and finish is None and not told:
            return None
        logprob = result.logprobs.get(chunk)
        if finish is not None:
            error = result.failed.get(chunk)
            return self.last(seq, finish, token, logprob, told=told, error=error)
        self.generated_tokens += token >= 0
        fresh = self._introduce(seq)
        return Delta(
            id=seq.id,
            tokens=[token] if token >= 0 else [],
            logprobs=[] if logprob is None else [_wire(logprob)],
            prompt_logprobs=told,
            cached_tokens=seq.hit_tokens if fresh else None,
            queue_s=_queue_s(seq) if fresh else None,
            prompt_blocks=self._names(seq) if fresh else b"",
        )

    def last(
        self,
        seq: Sequence,
        finish: FinishReason,
        token: int = -1,
        logprob: Logprob | None = None,
        *,
        told: list[TokenLogprob] | None = None,
        error: str | None = None,
    ) -> Delta:
        """The delta that ends a request."""
        self.generated_tokens += token >= 0
        fresh = self._introduce(seq)
        self._prompt_told.pop(seq.id, None)
        return Delta(
            id=seq.id,
            tokens=[token] if token >= 0 else [],
            logprobs=[] if logprob is None or token < 0 else [_wire(logprob)],
            prompt_logprobs=told or [],
            finish=finish,
            stop_token=token if finish == "stop" else None,
            error=error,
            cached_tokens=seq.hit_tokens if fresh else None,
            queue_s=_queue_s(seq) if fresh else None,
            prompt_blocks=self._names(seq) if fresh else b"",
        )

    def _introduce(self, seq: Sequence) -> bool:
        """Whether this is the request's first delta."""
        if seq.id in self._fresh:
            self._fresh.remove(seq.id)
            self.begun += 1
            return True
        return False

    def _names(self, seq: Sequence) -> bytes:
        """Of the prompt's full blocks, as far as they were hashed to be found or published."""
        full = min(seq.prompt_len // self._block_size, MOST_NAMED)
        return b"".join([key[:NAME_BYTES] for key in seq.hashes[:full]])

    def _prompt_news(
        self, plan: Plan, result: StepResult, seq: Sequence, chunk: int
    ) -> list[TokenLogprob]:
        """Prompt log-probabilities not sent yet (a preempted request computes some again)."""
        found = result.prompt_logprobs.get(chunk)
        told = self._prompt_told.get(seq.id)
        if not found or told is None:
            return []
        news = found[max(0, told - plan.starts[chunk]) :]
        self._prompt_told[seq.id] = max(told, plan.starts[chunk] + len(found))
        return [_wire(logprob) for logprob in news]


def _queue_s(seq: Sequence) -> float | None:
    return None if seq.scheduled_at is None else seq.scheduled_at - seq.arrival


def _wire(logprob: Logprob) -> TokenLogprob:
    return TokenLogprob(logprob.token, logprob.logprob, logprob.rank, logprob.top)
