"""Construction of a load plan from a workload, a load and a seed."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from argosy.bench.distributions import ArrivalProcess, LengthDistribution, draw_arrival_times
from argosy.bench.errors import BenchError
from argosy.bench.input_files import (
    MOONCAKE_BLOCK_TOKENS,
    FilePrompt,
    TraceRequest,
    read_prompt_file,
    read_trace,
)
from argosy.bench.plan import (
    LoadPlan,
    PlannedPrompt,
    PlannedRequest,
    RequestPhase,
    SyntheticPrompt,
    SyntheticSpan,
    derive_seed,
)

MAX_CLOSED_LOOP_REQUESTS = 20_000
"""Number of requests in the plan of a closed loop that has a duration but no number of requests."""
_OWN_STREAM, _PREFIX_STREAM, _BLOCK_STREAM, _DRAW_STREAM, _WARMUP_STREAM = range(2, 7)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the requests. Lengths are in tokens."""

    input: LengthDistribution
    output: LengthDistribution
    prefix_tokens: int = 0
    """Prefix before each synthetic prompt, shared by the prompts of a group."""
    prefix_groups: int = 1
    turns: int = 1
    """Requests per conversation."""
    think_s: float = 0.0
    """Pause between a response and the next turn."""
    prompts: str | None = None
    """Path of a file of prompts, which are used in order and repeated."""
    trace: str | None = None
    """Path of a trace, which determines the lengths, and the times if no rate is given."""
    trace_speed: float = 1.0
    """Speed factor of the trace's times: 2 replays it twice as fast."""


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Timing and number of the requests."""

    arrivals: ArrivalProcess | None = None
    """None for a trace's own times, or for a closed loop of `concurrency` requests."""
    concurrency: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    ramp_s: float = 0.0


def build_plan(workload: Workload, load: LoadSpec, seed: int, run: int = 0) -> LoadPlan:
    """Build the plan, which depends only on the arguments and the files that they name.

    Plans that differ only in `run` have the same times and lengths but different synthetic text. So prompts of one run
    do not hit the server's prefix cache in another run.

    Raises:
        BenchError: The workload and the load contradict each other, or a file is invalid.
    """
    _validate_workload(workload, load)
    source = _RequestSource(workload, load, seed, run)
    times = _session_times(workload, load, seed, source)
    sessions: list[tuple[PlannedRequest, ...]] = []
    index = 0
    for number, at_s in enumerate(times):
        turns = min(workload.turns, _remaining_requests(load, index))
        if not turns:
            break
        phase: RequestPhase = "ramp" if at_s is not None and at_s < load.ramp_s else "measured"
        session = []
        for turn in range(turns):
            prompt, output_tokens = source.build_item(index)
            session.append(
                PlannedRequest(
                    index=index,
                    session=number,
                    turn=turn,
                    at_s=at_s if turn == 0 else None,
                    think_s=workload.think_s if turn else 0.0,
                    prompt=prompt,
                    output_tokens=output_tokens,
                    phase=phase,
                )
            )
            index += 1
        sessions.append(tuple(session))
    if not sessions:
        raise BenchError("No request would be sent: give a longer --duration or a higher rate.")
    return LoadPlan(
        warmup=tuple(source.build_warmup(number) for number in range(load.warmup)),
        sessions=tuple(sessions),
        concurrency=load.concurrency,
        ramp_s=load.ramp_s,
        duration_s=load.duration_s,
    )


def _validate_workload(workload: Workload, load: LoadSpec) -> None:
    if workload.prompts and workload.trace:
        raise BenchError(
            "Prompts cannot come from both a file and a trace: give --prompts or --trace."
        )
    if workload.trace and workload.turns > 1:
        raise BenchError("A trace has no conversations: leave out --turns.")
    if load.arrivals is None and load.concurrency is None and workload.trace is None:
        raise BenchError("The load is missing: give --rate, --concurrency or --trace.")
    if not workload.trace_speed > 0:
        raise BenchError("The speed of a trace must be above 0: give a larger --trace-speed.")
    if math.inf in (load.duration_s, load.ramp_s, workload.think_s):
        raise BenchError("A duration, a ramp or a think time cannot be infinite: give seconds.")
    if load.duration_s is not None and load.duration_s <= load.ramp_s:
        raise BenchError("The run ends before its ramp: give a longer --duration.")


def _remaining_requests(load: LoadSpec, index: int) -> int:
    return MAX_CLOSED_LOOP_REQUESTS - index if load.requests is None else load.requests - index


def _session_times(
    workload: Workload, load: LoadSpec, seed: int, source: _RequestSource
) -> list[float] | list[None]:
    """Return the start of each conversation, or None where a closed loop decides."""
    sessions = None if load.requests is None else -(-load.requests // workload.turns)
    if load.arrivals is not None:
        if source.trace_requests:
            sessions = min(sessions or len(source.trace_requests), len(source.trace_requests))
        return draw_arrival_times(
            load.arrivals, seed=seed, count=sessions, duration_s=load.duration_s
        )
    if load.concurrency is not None and not source.trace_requests:
        if sessions is None and load.duration_s is None:
            raise BenchError("The run has no end: give --requests or --duration.")
        return [None] * (MAX_CLOSED_LOOP_REQUESTS if sessions is None else sessions)
    times = [row.at_s / workload.trace_speed for row in source.trace_requests]
    return [at_s for at_s in times if load.duration_s is None or at_s < load.duration_s]


class _RequestSource:
    """Prompts and output lengths by index in the plan."""

    def __init__(self, workload: Workload, load: LoadSpec, seed: int, run: int) -> None:
        self._workload = workload
        self._seed = seed
        self._text_seed = derive_seed(seed, run)
        self.trace_requests: list[TraceRequest] = []
        self._file_prompts: list[FilePrompt] = []
        if workload.trace:
            self.trace_requests = read_trace(Path(workload.trace), load.requests)
        if workload.prompts:
            self._file_prompts = read_prompt_file(Path(workload.prompts))

    def build_item(self, index: int) -> tuple[PlannedPrompt, int]:
        """Return the prompt and the output length of the request at `index`."""
        if self.trace_requests:
            return self._build_from_trace(index, self.trace_requests[index])
        rng = np.random.default_rng((self._seed, _DRAW_STREAM, index))
        if self._file_prompts:
            prompt = self._file_prompts[index % len(self._file_prompts)]
            drawn_tokens = self._workload.output.draw(rng)
            return prompt.prompt, prompt.output_tokens or drawn_tokens
        return self._draw_synthetic(rng, derive_seed(self._text_seed, _OWN_STREAM, index))

    def build_warmup(self, number: int) -> PlannedRequest:
        """Return a warm-up request of the same kind that shares no text with the plan's requests."""
        rng = np.random.default_rng((self._seed, _WARMUP_STREAM, number))
        prompt, output_tokens = self._draw_synthetic(
            rng, derive_seed(self._text_seed, _WARMUP_STREAM, number)
        )
        spans = tuple(
            SyntheticSpan(derive_seed(span.seed, _WARMUP_STREAM), span.tokens)
            for span in prompt.spans
        )
        return PlannedRequest(
            index=-1 - number,
            session=-1 - number,
            prompt=SyntheticPrompt(spans),
            output_tokens=output_tokens,
            phase="warmup",
        )

    def _draw_synthetic(
        self, rng: np.random.Generator, own_seed: int
    ) -> tuple[SyntheticPrompt, int]:
        workload = self._workload
        spans = [SyntheticSpan(own_seed, workload.input.draw(rng))]
        output_tokens = workload.output.draw(rng)
        if workload.prefix_tokens:
            group = int(rng.integers(workload.prefix_groups))
            spans.insert(
                0,
                SyntheticSpan(
                    derive_seed(self._text_seed, _PREFIX_STREAM, group), workload.prefix_tokens
                ),
            )
        return SyntheticPrompt(tuple(spans)), output_tokens

    def _build_from_trace(self, index: int, row: TraceRequest) -> tuple[SyntheticPrompt, int]:
        spans = []
        remaining = row.input_tokens
        for block in row.block_ids:
            if remaining <= 0:
                break
            tokens = min(remaining, MOONCAKE_BLOCK_TOKENS)
            spans.append(SyntheticSpan(derive_seed(self._text_seed, _BLOCK_STREAM, block), tokens))
            remaining -= tokens
        if remaining > 0:
            spans.append(SyntheticSpan(derive_seed(self._text_seed, _OWN_STREAM, index), remaining))
        return SyntheticPrompt(tuple(spans)), row.output_tokens
