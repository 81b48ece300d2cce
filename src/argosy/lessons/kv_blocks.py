"""Lesson on the paged KV cache: requests take blocks one by one, and share those of a common prefix."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from argosy.engine.scheduling import Scheduler, Sequence
from argosy.lessons.engine_simulation import Arrival, EngineSimulation, SimulatedStep
from argosy.lessons.lesson import (
    LessonRun,
    count_of,
    describe_parameters,
    name_requests,
    slider,
)

BLOCK_TOKENS = 8
ARRIVAL_INTERVAL = 2
STEP_TOKENS = 48
MAX_REQUESTS = 6

RequestState = Literal["waiting", "running", "ended"]


class KvBlocksParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the lesson."""

    blocks: Annotated[int, slider("KV cache", 12, 40, unit="blocks of 8 tokens")] = 22
    shared_blocks: Annotated[int, slider("Common prefix of all prompts", 0, 6, unit="blocks")] = 4
    requests: Annotated[int, slider("Requests", 1, MAX_REQUESTS)] = 5
    output_tokens: Annotated[int, slider("Output of each request", 1, 24, unit="tokens")] = 16


class KvRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has arrived."""

    number: int
    state: RequestState
    tokens: int
    """Tokens of its prompt and its output so far."""
    cached_tokens: int
    """Tokens of its prompt whose blocks were there when it joined."""


class KvBlocksFrame(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks and requests while a step is computed."""

    step: int
    text: str
    owners: list[list[int]]
    """Numbers of the requests that use each block. A free or cached block has none."""
    filled: list[int]
    """Computed tokens in each block."""
    cached: list[int]
    """Blocks that no request uses, kept for later requests with the same prefix."""
    requests: list[KvRequest]


def run_kv_blocks(parameters: KvBlocksParameters) -> LessonRun[KvBlocksFrame]:
    """Run the scheduler until all requests have ended."""
    simulation = EngineSimulation(
        [_build_arrival(number, parameters) for number in range(1, parameters.requests + 1)],
        max_seqs=MAX_REQUESTS,
        num_blocks=parameters.blocks,
        block_size=BLOCK_TOKENS,
        max_step_tokens=STEP_TOKENS,
    )
    frames: list[KvBlocksFrame] = []
    ended: set[int] = set()
    preemptions = most_running = 0
    while simulation.has_work:
        step = simulation.schedule_step()
        owners, filled = _read_blocks(simulation.scheduler, parameters.blocks)
        pool = simulation.scheduler.kv_cache.pool
        cached = [block for block in range(parameters.blocks) if pool.is_cached(block)]
        for block in cached:
            filled[block] = BLOCK_TOKENS
        sentences = _explain_joining(step)
        if simulation.scheduler.preemptions > preemptions:
            preemptions = simulation.scheduler.preemptions
            sentences.append("A running request was preempted, because no block was left.")
        sentences += _explain_waiting(simulation)
        requests = [
            _describe_request(number, seq, has_ended=number in ended)
            for number, seq in simulation.sequences.items()
        ]
        most_running = max(most_running, len(simulation.scheduler.running))
        if ending := simulation.commit_step(step):
            sentences.append(
                f"{name_requests(ending)} got the last token and gives the blocks back."
            )
            ended.update(ending)
        frames.append(
            KvBlocksFrame(
                step=step.number,
                text=" ".join(sentences) or "Each running request computes one token.",
                owners=owners,
                filled=filled,
                cached=cached,
                requests=requests,
            )
        )
    return LessonRun(
        parameters=describe_parameters(parameters),
        frames=frames,
        result=_summarize(parameters, simulation, most_running),
    )


def _build_arrival(number: int, parameters: KvBlocksParameters) -> Arrival:
    """Build a request with the common prefix, and 9 to 24 tokens of its own."""
    own_tokens = 9 + (number * 7) % 16
    prompt = list(range(1, parameters.shared_blocks * BLOCK_TOKENS + 1))
    prompt += [number * 1000 + position for position in range(own_tokens)]
    return Arrival(number, 1 + (number - 1) * ARRIVAL_INTERVAL, prompt, parameters.output_tokens)


def _read_blocks(scheduler: Scheduler, num_blocks: int) -> tuple[list[list[int]], list[int]]:
    """Return the owners of each block, and its computed tokens."""
    owners: list[list[int]] = [[] for _ in range(num_blocks)]
    filled = [0] * num_blocks
    for seq in scheduler.running:
        for index, block in enumerate(seq.block_tables[0]):
            owners[block].append(int(seq.id))
            computed = min(BLOCK_TOKENS, max(0, seq.computed_len - index * BLOCK_TOKENS))
            filled[block] = max(filled[block], computed)
    return owners, filled


def _explain_joining(step: SimulatedStep) -> list[str]:
    sentences = []
    for seq in step.admitted:
        found, needed = seq.hit_tokens // BLOCK_TOKENS, len(seq.block_tables[0])
        shared = (
            f"shares {found} of its {needed} blocks"
            if found and not seq.preemptions
            else f"takes {count_of(needed, 'block')}"
        )
        sentences.append(f"Request {seq.id} joins and {shared}.")
    return sentences


def _explain_waiting(simulation: EngineSimulation) -> list[str]:
    """Explain why the first waiting request does not join, and which ones wait for a prefix."""
    scheduler = simulation.scheduler
    sentences = []
    head = scheduler.queue.peek()
    if head is not None:
        needed = scheduler.kv_cache.blocks_needed(head)
        available = scheduler.kv_cache.pool.available_blocks
        blocks = count_of(needed, "block")
        sentences.append(
            f"Request {head.id} waits: it needs {blocks}, and {available} can be taken."
            if needed > available
            else f"Request {head.id} waits: its {blocks} would fit, but those that run will need blocks too."
        )
    blocked = [int(seq.id) for seq in scheduler.requests.blocked_requests]
    if blocked:
        verb = "wait" if len(blocked) > 1 else "waits"
        sentences.append(f"{name_requests(blocked)} {verb} for the prefix that is being computed.")
    return sentences


def _describe_request(number: int, seq: Sequence, *, has_ended: bool) -> KvRequest:
    state: RequestState = "ended" if has_ended else "running" if seq.row >= 0 else "waiting"
    return KvRequest(
        number=number, state=state, tokens=len(seq.tokens), cached_tokens=seq.hit_tokens
    )


def _summarize(
    parameters: KvBlocksParameters, simulation: EngineSimulation, most_running: int
) -> str:
    """Compare with memory that is reserved for the longest request, as without pages."""
    longest = max(seq.max_length for seq in simulation.sequences.values())
    fitting = parameters.blocks * BLOCK_TOKENS // longest
    kv_cache = simulation.scheduler.kv_cache
    return (
        f"Up to {count_of(most_running, 'request')} ran at once. With a contiguous piece of {longest} tokens for each, "
        f"{fitting} would fit. Sharing saved the computation of {kv_cache.hit_tokens} of {kv_cache.query_tokens} "
        "prompt tokens."
    )
