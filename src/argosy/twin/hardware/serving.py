"""Simulation of one replica under load, fast enough for a planner: decode steps are advanced in closed form.

Between two events (a request is admitted, ends or is preempted) the batch is the same. The price of a step is then
linear in the context, so k steps cost k times the step in their middle. Requests are served in the order of their
arrival, prompts enter steps in the engine's way, and the KV cache limits how many run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

import msgspec

from argosy.twin.hardware.accelerators import EngineProfile
from argosy.twin.hardware.errors import CapacityError
from argosy.twin.step_cost import StepCost


class OfferedRequest(msgspec.Struct, frozen=True):
    """A request to a replica."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache has."""


class RequestTimes(msgspec.Struct, frozen=True):
    """Times of a simulated request in seconds."""

    sent_s: float
    first_token_s: float
    last_token_s: float
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Mean time of an output token after the first."""
        return (self.last_token_s - self.first_token_s) / max(self.output_tokens - 1, 1)


class ServingLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a replica, and how it forms steps."""

    kv_tokens: int
    engine: EngineProfile
    max_sequences: int = 1024
    max_batch_tokens: int | None = None
    """Most tokens of a step. By default the engine's."""
    wait_steps: int = 0
    """Decode steps for which the engine waits until prompts fill 90 % of a step."""


class _Sequence:
    """A request inside the replica."""

    __slots__ = (
        "context",
        "end_context",
        "first_s",
        "index",
        "is_stale",
        "left",
        "prompt",
        "sent_s",
    )

    def __init__(self, index: int, sent_s: float, prompt: int, cached: int, left: int) -> None:
        self.index = index
        self.sent_s = sent_s
        self.prompt = prompt
        self.context = min(cached, prompt - 1)
        """Tokens in the KV cache while the prompt is computed."""
        self.left = left
        """Tokens of output that are left when the prompt is computed."""
        self.end_context = 0
        """Tokens in the KV cache when the sequence ends."""
        self.first_s = -1.0
        self.is_stale = False
        """Whether the sequence was preempted, and another object stands for its request."""


def simulate_replica(
    cost: StepCost,
    limits: ServingLimits,
    requests: Sequence[OfferedRequest],
    *,
    concurrency: int | None = None,
) -> list[RequestTimes]:
    """Return the times of the requests, in the order of their ends.

    Args:
        cost: Price of the steps.
        limits: Limits of the replica.
        requests: Requests in the order of their arrivals.
        concurrency: Clients of a closed loop, each of which sends the next request when its last one ends; arrival
            times are then ignored. None sends the requests at their times.

    Raises:
        CapacityError: A request needs more KV cache than the replica has.
    """
    return _Replica(cost, limits, requests, concurrency).run()


class _Replica:
    def __init__(
        self,
        cost: StepCost,
        limits: ServingLimits,
        requests: Sequence[OfferedRequest],
        concurrency: int | None,
    ) -> None:
        longest = max((each.prompt_tokens + each.output_tokens for each in requests), default=0)
        if longest > limits.kv_tokens:
            raise CapacityError(
                f"a request of {longest:,} tokens exceeds the KV cache of {limits.kv_tokens:,} tokens; use more"
                " accelerators for a replica, or smaller weights"
            )
        self._cost = cost
        self._limits = limits
        self._budget = limits.max_batch_tokens or limits.engine.max_batch_tokens
        self._mode = limits.engine.prefill
        self._delay_s = limits.engine.request_ms / 1e3
        self._requests = requests
        self._next = 0
        self._arrivals: list[tuple[float, int, float]] = []
        self._closed = concurrency is not None
        self._waiting: deque[_Sequence] = deque()
        self._partial: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._ends: list[tuple[int, int, _Sequence]] = []
        self._now = 0.0
        self._steps = 0
        self._admissions = 0
        self._context = 0
        self._held = 0
        """Tokens of the KV cache that prompts in parts, or reservations, hold beside the running context."""
        self._waited = 0
        self._done: list[RequestTimes] = []
        if concurrency is None:
            self._arrivals = [
                (each.arrival_s + self._delay_s, index, each.arrival_s)
                for index, each in enumerate(requests)
            ]
            heapq.heapify(self._arrivals)
        else:
            for _ in range(min(concurrency, len(requests))):
                self._send()

    def run(self) -> list[RequestTimes]:
        while True:
            while self._arrivals and self._arrivals[0][0] <= self._now:
                _, index, sent_s = heapq.heappop(self._arrivals)
                each = self._requests[index]
                self._waiting.append(
                    _Sequence(
                        index, sent_s, each.prompt_tokens, each.cached_tokens, each.output_tokens
                    )
                )
            chunks = self._plan_prefill()
            if chunks:
                self._run_prefill(chunks)
            elif self._running:
                self._run_decode()
            elif self._arrivals:
                self._now = max(self._now, self._arrivals[0][0])
            else:
                return self._done

    def _send(self) -> None:
        if self._next < len(self._requests):
            heapq.heappush(self._arrivals, (self._now + self._delay_s, self._next, self._now))
            self._next += 1

    def _plan_prefill(self) -> list[tuple[_Sequence, int]]:
        """Return the sequences whose prompts the next step computes, with the tokens of each."""
        if not (self._waiting or self._partial) or self._waits():
            return []
        budget = self._budget - (len(self._running) if self._mode != "alone" else 0)
        chunks = []
        for sequence in self._partial:
            tokens = min(budget, sequence.prompt - sequence.context)
            if tokens <= 0:
                break
            chunks.append((sequence, tokens))
            budget -= tokens
        while self._waiting and budget > 0 and self._has_slot(len(chunks)):
            sequence = self._waiting[0]
            need = sequence.prompt - sequence.context
            if self._mode == "whole" and need > budget and (chunks or need <= self._budget):
                break
            if not self._has_memory(sequence):
                break
            self._waiting.popleft()
            self._partial.append(sequence)
            self._held += sequence.prompt + (sequence.left if self._mode == "whole" else 0)
            tokens = min(budget, need)
            chunks.append((sequence, tokens))
            budget -= tokens
        return chunks

    def _has_slot(self, planned: int) -> bool:
        return len(self._running) + max(planned, len(self._partial)) < self._limits.max_sequences

    def _has_memory(self, sequence: _Sequence) -> bool:
        room = self._limits.kv_tokens - self._held - self._context
        if self._mode == "whole":
            return room >= sequence.prompt + sequence.left
        return room > sequence.prompt or not (self._running or self._partial)

    def _waits(self) -> bool:
        """Return whether the engine waits for more prompts (TensorRT-LLM's batch_wait_timeout_iters)."""
        if not self._limits.wait_steps or not self._running or self._partial:
            return False
        if self._waited >= self._limits.wait_steps:
            self._waited = 0
            return False
        planned = 0
        for sequence in self._waiting:
            if planned + sequence.prompt > self._budget:
                break
            planned += sequence.prompt
        return planned < 0.9 * self._budget

    def _run_prefill(self, chunks: list[tuple[_Sequence, int]]) -> None:
        decodes = self._mode != "alone"
        rows = len(self._running) if decodes else 0
        parts = [(tokens, sequence.context) for sequence, tokens in chunks]
        self._now += self._cost.step_seconds(rows, self._context if rows else 0, parts)
        if rows:
            self._advance(1)
        for sequence, tokens in chunks:
            sequence.context += tokens
        reserves = self._mode == "whole"
        while self._partial and self._partial[0].context >= self._partial[0].prompt:
            sequence = self._partial.popleft()
            self._held -= sequence.prompt + reserves
            if sequence.first_s < 0:
                sequence.first_s = self._now
            sequence.left -= 1
            if sequence.left == 0:
                self._finish(sequence)
                continue
            self._context += sequence.context
            sequence.end_context = sequence.context + sequence.left
            self._running.append(sequence)
            self._admissions += 1
            end = (self._steps + sequence.left, self._admissions, sequence)
            heapq.heappush(self._ends, end)
        self._end_finished()

    def _run_decode(self) -> None:
        rows = len(self._running)
        while self._ends[0][2].is_stale:
            heapq.heappop(self._ends)
        steps = self._ends[0][0] - self._steps
        room = self._limits.kv_tokens - self._context - (self._held if self._mode != "whole" else 0)
        if room < rows * steps and self._mode != "whole":
            steps = room // rows
            if steps <= 0:
                self._preempt()
                return
        if self._limits.wait_steps and self._waiting:
            steps = max(1, min(steps, self._limits.wait_steps - self._waited))
            self._waited += steps
        if self._arrivals:
            first = self._cost.step_seconds(rows, self._context)
            until = self._arrivals[0][0] - self._now
            steps = max(1, min(steps, int(until / first) + 1))
        middle = self._context + rows * (steps - 1) / 2
        self._now += steps * self._cost.step_seconds(rows, middle)
        self._advance(steps)
        self._end_finished()

    def _advance(self, steps: int) -> None:
        """Let every running sequence decode `steps` tokens."""
        self._steps += steps
        self._context += steps * len(self._running)
        if self._mode == "whole":
            self._held -= steps * len(self._running)

    def _end_finished(self) -> None:
        ended = set()
        while self._ends and self._ends[0][0] <= self._steps:
            _, _, sequence = heapq.heappop(self._ends)
            if not sequence.is_stale:
                self._context -= sequence.end_context
                ended.add(sequence.index)
                self._finish(sequence)
        if ended:
            self._running = [each for each in self._running if each.index not in ended]

    def _finish(self, sequence: _Sequence) -> None:
        output = self._requests[sequence.index].output_tokens
        self._done.append(RequestTimes(sequence.sent_s, sequence.first_s, self._now, output))
        if self._closed:
            self._send()

    def _preempt(self) -> None:
        """Return the sequence that was admitted last to the queue. Its tokens are computed again."""
        sequence = self._running.pop()
        sequence.is_stale = True
        end_step = next(step for step, _, each in self._ends if each is sequence)
        left = end_step - self._steps
        context = sequence.end_context - left
        self._context -= context
        again = _Sequence(sequence.index, sequence.sent_s, context + 1, 0, left)
        again.first_s = sequence.first_s
        self._waiting.appendleft(again)
