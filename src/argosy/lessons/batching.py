"""Lesson on batching: the same requests under continuous and under static batching."""

from __future__ import annotations

from typing import Annotated

import msgspec

from argosy.engine.scheduling import BatchingPolicy, ContinuousBatching, StaticBatching
from argosy.lessons.engine_simulation import Arrival, EngineSimulation
from argosy.lessons.lesson import (
    LessonRun,
    describe_parameters,
    join_words,
    name_requests,
    slider,
)

PROMPT_TOKENS = 8
OUTPUT_PERCENTS = (100, 20, 55, 10, 80, 30, 65, 15, 90, 25, 45, 35)
"""Output of each request, in percent of the longest one."""


class BatchingParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the lesson."""

    requests: Annotated[int, slider("Requests", 2, len(OUTPUT_PERCENTS))] = 8
    slots: Annotated[int, slider("Places in the batch", 1, 6)] = 3
    interval: Annotated[int, slider("Time between two arrivals", 0, 6, unit="steps")] = 0
    longest_output: Annotated[int, slider("Longest output", 4, 32, unit="tokens")] = 20


class BatchingLane(msgspec.Struct, frozen=True, kw_only=True):
    """Batch of a step under one policy."""

    slots: list[int]
    """Number of the request in each place of the batch, 0 for none."""
    prefills: list[int]
    """Numbers of the requests whose prompt the step computes."""
    waiting: list[int]
    ended: list[int]
    """Numbers of the requests that get their last token with this step."""


class BatchingFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of a step under both policies."""

    step: int
    text: str
    static: BatchingLane
    continuous: BatchingLane


def run_batching(parameters: BatchingParameters) -> LessonRun[BatchingFrame]:
    """Run the scheduler once with each policy."""
    static = _run_policy(StaticBatching(), parameters)
    continuous = _run_policy(ContinuousBatching(), parameters)
    idle = BatchingLane(slots=[0] * parameters.slots, prefills=[], waiting=[], ended=[])
    frames = []
    for index in range(max(len(static), len(continuous))):
        lanes = [lane[index] if index < len(lane) else idle for lane in (static, continuous)]
        text = f"Static: {_explain(lanes[0])} Continuous: {_explain(lanes[1])}"
        frames.append(
            BatchingFrame(step=index + 1, text=text, static=lanes[0], continuous=lanes[1])
        )
    result = (
        f"Static batching needs {len(static)} steps and leaves {_idle_percent(static)} % of the places empty. "
        f"Continuous batching needs {len(continuous)} steps and leaves {_idle_percent(continuous)} % empty. Requests "
        f"wait {_mean_wait(static):.1f} steps on average, and {_mean_wait(continuous):.1f}."
    )
    return LessonRun(parameters=describe_parameters(parameters), frames=frames, result=result)


def _run_policy(policy: BatchingPolicy, parameters: BatchingParameters) -> list[BatchingLane]:
    arrivals = [
        Arrival(
            number + 1,
            1 + number * parameters.interval,
            [number * 1000 + position for position in range(PROMPT_TOKENS)],
            max(1, parameters.longest_output * OUTPUT_PERCENTS[number] // 100),
        )
        for number in range(parameters.requests)
    ]
    simulation = EngineSimulation(
        arrivals,
        max_seqs=parameters.slots,
        num_blocks=parameters.slots * (PROMPT_TOKENS + parameters.longest_output),
        block_size=PROMPT_TOKENS,
        max_step_tokens=parameters.slots * PROMPT_TOKENS,
        batching_policy=policy,
    )
    lanes = []
    while simulation.has_work:
        step = simulation.schedule_step()
        slots = [0] * parameters.slots
        for row, seq in step.batch.items():
            slots[row] = int(seq.id)
        waiting = sorted(int(seq.id) for seq in simulation.scheduler.queue)
        prefills = [slots[row] for row in step.prefills]
        ended = simulation.commit_step(step)
        lanes.append(BatchingLane(slots=slots, prefills=prefills, waiting=waiting, ended=ended))
    return lanes


def _explain(lane: BatchingLane) -> str:
    running, free = sorted(filter(None, lane.slots)), lane.slots.count(0)
    if not running:
        return "nothing runs."
    if lane.prefills:
        verb = "joins" if len(lane.prefills) == 1 else "join"
        text = f"{name_requests(lane.prefills).lower()} {verb}"
    else:
        text = f"{name_requests(running).lower()} {'runs' if len(running) == 1 else 'run'}"
    if lane.waiting and free:
        verb = "waits" if len(lane.waiting) == 1 else "wait"
        text += f"; {join_words(lane.waiting)} {verb}, although {free} of {len(lane.slots)} places are empty"
    elif lane.waiting:
        text += f"; {join_words(lane.waiting)} {'waits' if len(lane.waiting) == 1 else 'wait'} for a place"
    return f"{text}."


def _idle_percent(lanes: list[BatchingLane]) -> int:
    idle = sum(lane.slots.count(0) for lane in lanes)
    return round(100 * idle / sum(len(lane.slots) for lane in lanes))


def _mean_wait(lanes: list[BatchingLane]) -> float:
    """Return for how many steps a request waits on average."""
    requests = {number for lane in lanes for number in lane.slots if number}
    return sum(len(lane.waiting) for lane in lanes) / len(requests)
