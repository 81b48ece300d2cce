"""The engine's scheduler without an engine: each step takes one unit of time, and all sampled tokens are the same."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.engine import EngineRequest
from argosy.engine.scheduling import (
    BatchingPolicy,
    Scheduler,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepResult,
)
from argosy.protocol import SamplingParams

SAMPLED_TOKEN = 0
MAX_STEPS = 400
"""Steps after which a lesson ends, whatever its parameters."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives before step `step`."""

    number: int
    step: int
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Step that is planned and not yet committed."""

    number: int
    plan: StepPlan
    batch: dict[int, Sequence]
    """Sequences of the step by their rows."""

    @property
    def admitted(self) -> list[Sequence]:
        """Sequences that join the batch with this step."""
        return [self.batch[one.row] for one in self.plan.admissions if one.row in self.batch]

    @property
    def prefills(self) -> list[int]:
        """Rows of the sequences of which the step computes more than their last token."""
        return [
            row for row, count in zip(self.plan.rows, self.plan.counts, strict=True) if count > 1
        ]


class EngineSimulation:
    """A scheduler, and requests that arrive at given steps."""

    def __init__(
        self,
        arrivals: list[Arrival],
        *,
        max_seqs: int,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        batching_policy: BatchingPolicy | None = None,
    ) -> None:
        limits = SchedulerLimits(
            max_seqs=max_seqs,
            max_step_tokens=max_step_tokens,
            block_size=block_size,
            num_blocks=num_blocks,
            max_prefill_fraction=1.0,
            watermark=0.0,
            prefix_cache=True,
            ridge_tokens=max_step_tokens,
        )
        self.scheduler = Scheduler(limits, batching_policy)
        self.sequences: dict[int, Sequence] = {}
        """Sequences of all requests that have arrived, by number."""
        self._arrivals = arrivals
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a request runs, waits or is still to arrive."""
        is_expecting = len(self.sequences) < len(self._arrivals)
        return (is_expecting or self.scheduler.has_work) and self._steps < MAX_STEPS

    def schedule_step(self) -> SimulatedStep:
        """Add the requests that arrive now, and plan a step."""
        self._steps += 1
        now = float(self._steps)
        for arrival in self._arrivals:
            if arrival.step == self._steps:
                request = EngineRequest(
                    id=str(arrival.number),
                    prompt=arrival.prompt,
                    params=SamplingParams(max_tokens=arrival.output_tokens),
                )
                self.sequences[arrival.number] = self.scheduler.add(request, now=now)
        plan = self.scheduler.schedule(now)
        planned = set(plan.rows)
        batch = {seq.row: seq for seq in self.scheduler.running if seq.row in planned}
        return SimulatedStep(self._steps, plan, batch)

    def commit_step(self, step: SimulatedStep) -> list[int]:
        """Commit a planned step, and return the numbers of the requests that end with it."""
        tokens = [SAMPLED_TOKEN if is_sampled else -1 for is_sampled in step.plan.sample_counts]
        updates = self.scheduler.commit(StepResult(tokens))
        return [int(update.seq.id) for update in updates if update.finish_reason]
