"""From a description of the traffic and a seed to a plan."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from argosy.bench.arrivals import Arrivals, arrival_times
from argosy.bench.errors import BenchError
from argosy.bench.lengths import Lengths
from argosy.bench.plan import Phase, Plan, PlannedRequest, Prompt, Span, Spans, mix
from argosy.bench.prompt_files import FilePrompt, read_prompts
from argosy.bench.traces import MOONCAKE_BLOCK_TOKENS, Traced, read_trace

CLOSED_LOOP_BOUND = 20_000
"""Requests in the plan of a closed loop that only a duration ends."""
_OWN, _PREFIX, _BLOCK, _DRAW, _WARMUP = range(2, 7)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Lengths are in tokens."""

    input: Lengths
    output: Lengths
    prefix_tokens: int = 0
    """Before each synthetic prompt, shared by those of a group."""
    prefix_groups: int = 1
    turns: int = 1
    """Requests of a conversation."""
    think_s: float = 0.0
    """Between an answer and the next turn."""
    prompts: str | None = None
    """Path of a file of prompts; in order, from the beginning again when they run out."""
    trace: str | None = None
    """Path of a trace, which then gives lengths and, without a rate, times."""
    trace_speed: float = 1.0
    """Twice as fast with 2."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How it is asked."""

    arrivals: Arrivals | None = None
    """None: a trace's own times, or a closed loop of `concurrency`."""
    concurrency: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 0
    ramp_s: float = 0.0


class _Item(msgspec.Struct, frozen=True):
    """One request before it has a place in time."""

    prompt: Prompt
    output_tokens: int


def make_plan(workload: Workload, load: Load, seed: int, run: int = 0) -> Plan:
    """The plan: a function of its arguments and of the files that they name. Raises BenchError.

    Plans that differ in `run` alone have the same times and lengths and other synthetic text, so
    that what one run leaves in the server's prefix cache helps no other.
    """
    _check(workload, load)
    source = _Source(workload, load, seed, run)
    times = _times(workload, load, seed, source)
    sessions: list[tuple[PlannedRequest, ...]] = []
    index = 0
    for number, at_s in enumerate(times):
        turns = min(workload.turns, _left(load, index))
        if not turns:
            break
        phase: Phase = "ramp" if at_s is not None and at_s < load.ramp_s else "measured"
        session = []
        for turn in range(turns):
            item = source.item(index)
            session.append(
                PlannedRequest(
                    index=index,
                    session=number,
                    turn=turn,
                    at_s=at_s if turn == 0 else None,
                    think_s=workload.think_s if turn else 0.0,
                    prompt=item.prompt,
                    output_tokens=item.output_tokens,
                    phase=phase,
                )
            )
            index += 1
        sessions.append(tuple(session))
    if not sessions:
        raise BenchError("Nothing would be sent: give a longer --duration or a higher rate.")
    return Plan(
        warmup=tuple(source.warmup(number) for number in range(load.warmup)),
        sessions=tuple(sessions),
        concurrency=load.concurrency,
        ramp_s=load.ramp_s,
        duration_s=load.duration_s,
    )


def _check(workload: Workload, load: Load) -> None:
    if workload.prompts and workload.trace:
        raise BenchError("Prompts come from a file or a trace, not from both.")
    if workload.trace and workload.turns > 1:
        raise BenchError("A trace has no conversations: leave --turns out.")
    if load.arrivals is None and load.concurrency is None and workload.trace is None:
        raise BenchError("Say how to send: --rate, --concurrency or --trace.")
    if not workload.trace_speed > 0:
        raise BenchError("A trace is played at a speed of more than 0.")
    if math.inf in (load.duration_s, load.ramp_s, workload.think_s):
        raise BenchError("A duration, a ramp or a pause of inf has no end: give seconds.")
    if load.duration_s is not None and load.duration_s <= load.ramp_s:
        raise BenchError("The run ends before its ramp does: give a longer --duration.")


def _left(load: Load, index: int) -> int:
    return CLOSED_LOOP_BOUND - index if load.requests is None else load.requests - index


def _times(workload: Workload, load: Load, seed: int, source: _Source) -> list[float] | list[None]:
    """When each conversation begins; None where a closed loop decides."""
    sessions = None if load.requests is None else -(-load.requests // workload.turns)
    if load.arrivals is not None:
        if source.traced:
            sessions = min(sessions or len(source.traced), len(source.traced))
        return arrival_times(load.arrivals, seed=seed, count=sessions, duration_s=load.duration_s)
    if load.concurrency is not None and not source.traced:
        if sessions is None and load.duration_s is None:
            raise BenchError("The run needs an end: give --requests or --duration.")
        return [None] * (CLOSED_LOOP_BOUND if sessions is None else sessions)
    times = [row.at_s / workload.trace_speed for row in source.traced]
    return [at for at in times if load.duration_s is None or at < load.duration_s]


class _Source:
    """Prompts and output lengths by place in the plan."""

    def __init__(self, workload: Workload, load: Load, seed: int, run: int) -> None:
        self._workload = workload
        self._seed = seed
        self._text_seed = mix(seed, run)
        self.traced: list[Traced] = []
        self._file: list[FilePrompt] = []
        if workload.trace:
            self.traced = read_trace(Path(workload.trace), load.requests)
        if workload.prompts:
            self._file = read_prompts(Path(workload.prompts))

    def item(self, index: int) -> _Item:
        """The request at `index`."""
        if self.traced:
            return self._from_trace(index, self.traced[index])
        rng = np.random.default_rng((self._seed, _DRAW, index))
        if self._file:
            prompt = self._file[index % len(self._file)]
            drawn = self._workload.output.draw(rng)
            return _Item(prompt.prompt, prompt.output_tokens or drawn)
        return _Item(*self._synthetic(rng, mix(self._text_seed, _OWN, index)))

    def warmup(self, number: int) -> PlannedRequest:
        """A request of the same kind that shares no text with the plan's."""
        rng = np.random.default_rng((self._seed, _WARMUP, number))
        prompt, output_tokens = self._synthetic(rng, mix(self._text_seed, _WARMUP, number))
        spans = tuple(Span(mix(span.seed, _WARMUP), span.tokens) for span in prompt.spans)
        return PlannedRequest(
            index=-1 - number,
            session=-1 - number,
            prompt=Spans(spans),
            output_tokens=output_tokens,
            phase="warmup",
        )

    def _synthetic(self, rng: np.random.Generator, own: int) -> tuple[Spans, int]:
        workload = self._workload
        spans = [Span(own, workload.input.draw(rng))]
        output_tokens = workload.output.draw(rng)
        if workload.prefix_tokens:
            group = int(rng.integers(workload.prefix_groups))
            spans.insert(0, Span(mix(self._text_seed, _PREFIX, group), workload.prefix_tokens))
        return Spans(tuple(spans)), output_tokens

    def _from_trace(self, index: int, row: Traced) -> _Item:
        spans = []
        left = row.input_tokens
        for block in row.blocks:
            if left <= 0:
                break
            tokens = min(left, MOONCAKE_BLOCK_TOKENS)
            spans.append(Span(mix(self._text_seed, _BLOCK, block), tokens))
            left -= tokens
        if left > 0:
            spans.append(Span(mix(self._text_seed, _OWN, index), left))
        return _Item(Spans(tuple(spans)), row.output_tokens)
