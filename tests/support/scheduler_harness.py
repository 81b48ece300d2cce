"""Scheduler with a fake executor, and random workloads for it."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as st

from argosy.engine import EngineRequest
from argosy.engine.scheduling import KvCacheGroups, Scheduler, SchedulerLimits, Sequence, StepPlan
from argosy.protocol import SamplingParams
from tests.support.fake_executor import VOCAB, FakeExecutor, reference_output

WORKLOAD_STEPS = 41
KV_WINDOWS = [(None,), (None,), (None, 5), (None, 9, 1), (None, None, 6, 6, 6), (7,), (12, 4)]
"""Windows of KV cache groups."""


@dataclass
class SchedulerHarness:
    """A scheduler with its executor, and the output and finish reason of each request."""

    limits: SchedulerLimits
    scheduler: Scheduler = field(init=False)
    executor: FakeExecutor = field(init=False)
    now: float = 0.0
    draft_rng: random.Random | None = None
    """Draws the drafts of each sequence, of which the first ones are right. Without it, there are no drafts."""
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)
    """Finish reason by request, in the order in which the requests ended."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.executor = FakeExecutor(
            self.limits.num_blocks,
            self.limits.block_size,
            self.limits.max_step_tokens,
            self.limits.kv_windows,
            is_recurrent=self.limits.state_snapshots is not None,
        )

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        timeout_s: float = float("inf"),
        stop_token_ids: frozenset[int] = frozenset(),
        **fields: Any,  # noqa: ANN401 - fields of `EngineRequest`
    ) -> Sequence:
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(id=name, prompt=prompt, params=params, **fields)
        self.outputs[name] = list(request.resumed_tokens)
        return self.scheduler.add(
            request, now=self.now, timeout_s=timeout_s, stop_token_ids=stop_token_ids
        )

    def step(self) -> StepPlan:
        """Run one step, check the invariants, and return its plan."""
        self.now += 0.01
        for seq in self.scheduler.expire(self.now):
            self.finish(seq.id, "timeout")
        plan = self.scheduler.schedule(self.now, self._draft())
        assert len(self.scheduler.running) <= self.limits.max_seqs
        try:
            result = self.executor.execute(plan)
        except MemoryError:
            for seq in self.scheduler.recover_out_of_memory():
                self.finish(seq.id, "error")
            self.scheduler.check_invariants()
            return plan
        for seq, _, tokens, finish in self.scheduler.commit(result):
            self.outputs[seq.id] += tokens
            if finish:
                self.finish(seq.id, finish)
        self.scheduler.check_invariants()
        return plan

    def _draft(self) -> dict[Sequence, list[int]]:
        rng = self.draft_rng
        if rng is None:
            return {}
        self.executor.max_window = rng.choice([0, 1, 1 << 30, 1 << 30, 1 << 30])
        return {
            seq: reference_output(seq.tokens, rng.randint(0, 6))
            + rng.choices(range(VOCAB), k=rng.randint(0, 3))
            for seq in self.scheduler.running
            if seq.is_prefilled
        }

    def finish(self, name: str, reason: str) -> None:
        """Record the end of a request."""
        assert name not in self.finish_reasons, "a request ended twice"
        self.finish_reasons[name] = reason

    def cancel(self, name: str) -> None:
        """Cancel a request if it has not ended."""
        if self.scheduler.cancel(name):
            self.finish(name, "cancelled")

    def run(self, max_steps: int = 5000) -> None:
        """Run until all requests have ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "a request starves"
        kv_cache = self.scheduler.kv_cache
        assert kv_cache.pool.available_blocks == self.limits.num_blocks, "blocks leaked"

    def apply(self, event: WorkloadEvent) -> Sequence | None:
        """Apply one event of a workload. Return the sequence of a new request."""
        match event.action:
            case "add":
                return self.add(**event.options)  # type: ignore[arg-type]
            case "cancel":
                self.cancel(str(event.options["name"]))
            case _:
                self.executor.corrupt_slots.add(int(event.options["slot"]))  # type: ignore[call-overload]
        return None


class WorkloadEvent(NamedTuple):
    """New request, cancellation or corrupted host block before a step."""

    step: int
    action: str
    options: dict[str, object]


class Workload(NamedTuple):
    """Scheduler limits and events in the order of their steps."""

    limits: SchedulerLimits
    events: SequenceOf[WorkloadEvent]
    memory_tokens: int
    """Number of tokens above which a step runs out of memory."""


def scheduler_limits(**changes: object) -> SchedulerLimits:
    """Return small limits with some changes."""
    defaults = {
        "max_seqs": 4,
        "max_step_tokens": 16,
        "block_size": 4,
        "num_blocks": 32,
        "max_prefill_fraction": 0.5,
        "watermark": 0.01,
        "prefix_cache": True,
        "ridge_tokens": 2,
    }
    return SchedulerLimits(**(defaults | changes))  # type: ignore[arg-type]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Draw limits, and requests with shared prefixes, parents, resumed output, timeouts and faults."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    windows = draw(st.sampled_from(KV_WINDOWS))
    min_blocks = KvCacheGroups(windows, block_size).count_blocks(30)
    limits = scheduler_limits(
        max_seqs=draw(st.integers(1, 5)),
        max_step_tokens=draw(st.integers(5, 40)),
        block_size=block_size,
        num_blocks=draw(st.integers(min_blocks, min_blocks + 30)),
        host_blocks=draw(st.sampled_from([0, 3, 20])),
        prefix_cache=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        ridge_tokens=draw(st.sampled_from([2, 24])),
        kv_windows=windows,
        state_snapshots=draw(st.sampled_from([None, 0, 1, 3, 9])) if windows == (None,) else None,
    )
    shared_prefix = draw(st.lists(st.integers(0, 3), min_size=20, max_size=20))
    events: list[WorkloadEvent] = []
    for number in range(draw(st.integers(1, 12))):
        prompt = shared_prefix[: draw(st.integers(1, 20))]
        prompt += draw(st.lists(st.integers(0, 3), max_size=2))
        max_tokens = draw(st.integers(1, 30 - len(prompt)))
        resumed_output = reference_output(prompt, draw(st.integers(0, max_tokens - 1)))
        parent = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        options: dict[str, object] = {
            "name": str(number),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "resumed_tokens": resumed_output,
            "tenant": draw(st.sampled_from("ab")),
            "group_id": draw(st.sampled_from(["", "", "g", "h"])),
            "tier": draw(st.integers(0, 2)),
            "cache_domain": draw(st.sampled_from(["x", "x", "y"])),
            "timeout_s": draw(st.sampled_from([float("inf")] * 4 + [0.05])),
            "parent_id": None if parent is None else str(parent),
        }
        events.append(WorkloadEvent(draw(st.integers(0, 15)), "add", options))
        if draw(st.integers(0, 4)) == 0:
            events.append(WorkloadEvent(draw(st.integers(0, 40)), "cancel", {"name": str(number)}))
        if draw(st.integers(0, 5)) == 0:
            slot = draw(st.integers(0, 19))
            events.append(WorkloadEvent(draw(st.integers(0, 40)), "corrupt", {"slot": slot}))
    memory_tokens = draw(st.sampled_from([1, 4, 12, limits.max_step_tokens]))
    return Workload(limits, sorted(events, key=lambda event: event.step), memory_tokens)
