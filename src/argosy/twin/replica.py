"""Replica of a simulated fleet: the production scheduler with its KV cache, and a price for each of its steps.

With macro fidelity, steps in which sequences only decode are applied at once, up to the next one that may change
something else. Their time is the number of steps times the price of the middle one. An event from outside ends such a
leap at the step that is being computed, so that the decisions are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from argosy.engine import EngineRequest
from argosy.engine.scheduling import (
    BatchingPolicy,
    Scheduler,
    SchedulerLimits,
    Sequence,
    StepPlan,
    StepResult,
)
from argosy.twin.simulation import NS_PER_S, Simulation, require
from argosy.twin.step_cost import StepCost

Fidelity = Literal["exact", "macro"]
ReplicaState = Literal["starting", "ready", "draining", "down"]
SAMPLED_TOKEN = 0
MIN_LEAP_STEPS = 2
STEP_PRIORITY = 2
"""Steps begin after all else that happens at the same time, so that they see it."""


class Version(NamedTuple):
    """Version that replicas run."""

    generation: int
    slowdown: float = 1.0
    """Factor by which its steps take longer than those of the first one."""
    fails_to_start: bool = False


class _Leap(NamedTuple):
    """Decode steps that are applied at once."""

    started_ns: int
    steps: int
    rows: int
    context_tokens: int
    """Context of the first step."""


class SimulatedReplica:
    """A replica's process and its engine.

    Args:
        name: Name in the trace.
        simulation: Clock and events.
        limits: Limits of its scheduler.
        batching: Policy by which sequences join its batch.
        cost: Price of its steps.
        fidelity: Whether decode steps are applied at once.
        version: What it runs.
        on_tokens: Called with a sequence, the number of its new tokens, and whether it has ended.
    """

    def __init__(
        self,
        name: str,
        simulation: Simulation,
        *,
        limits: SchedulerLimits,
        batching: BatchingPolicy,
        cost: StepCost,
        fidelity: Fidelity,
        version: Version,
        on_tokens: Callable[[Sequence, int, bool], None],
    ) -> None:
        self.name = name
        self.state: ReplicaState = "ready"
        """State of its process, which its load report has while it is not down."""
        self.is_cut = False
        """Whether the network to it is cut."""
        self.is_report_stale = False
        """Whether its load report does not change."""
        self.is_cache_corrupt = False
        """Whether the blocks that it restores from host memory do not match their digests."""
        self.scheduler = Scheduler(limits, batching)
        self.generation = version.generation
        self.slowdown = version.slowdown
        """Factor by which steps take longer."""
        self.busy_ns = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self._simulation = simulation
        self._limits = limits
        self._batching = batching
        self._cost = cost
        tokens = limits.max_step_tokens
        self._prefill_rate = tokens / cost.step_seconds(0, 0, ((tokens, 0),))
        self._version = version
        self._is_macro = fidelity == "macro"
        self._on_tokens = on_tokens
        self._is_busy = False
        self._run = 0
        """Number of the step or leap that is being computed. Ends of earlier ones are void."""
        self._leap: _Leap | None = None

    # --- requests --------------------------------------------------------------------------------

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether a sequence fits into the KV cache by itself."""
        limits = self._limits
        tokens = prompt_tokens + output_tokens
        return (
            tokens <= limits.max_model_len and -(-tokens // limits.block_size) <= limits.num_blocks
        )

    def add(self, request: EngineRequest) -> None:
        """Add a request, which the next step may compute."""
        self._end_leap()
        self.scheduler.add(request, now=self._simulation.now)
        if not self._is_busy:
            self._is_busy = True
            self._simulation.call_at(
                self._simulation.now_ns, partial(self._begin, self._run), STEP_PRIORITY
            )

    def cancel(self, request_id: str) -> None:
        """End a request, if it has not ended."""
        self._end_leap()
        self.scheduler.cancel(request_id)

    def restart(self) -> None:
        """Lose all requests and the KV cache."""
        self.settle()
        self._run += 1
        self._is_busy, self._leap = False, None
        self.scheduler = Scheduler(self._limits, self._batching)

    def slow_down(self, factor: float) -> None:
        """Let the steps from the next one on take `factor` times as long as they do in its version."""
        self._end_leap()
        self.slowdown = factor * self._version.slowdown

    # --- figures ---------------------------------------------------------------------------------

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit into the KV cache."""
        return self._limits.num_blocks * self._limits.block_size

    @property
    def kv_usage_ratio(self) -> float:
        """Used part of the KV cache."""
        pool = self.scheduler.kv_cache.pool
        return pool.used_blocks / pool.num_blocks

    @property
    def inter_token_s(self) -> float:
        """Seconds between two tokens if one more sequence runs."""
        running = self.scheduler.running
        context = sum(seq.length for seq in running)
        return self._cost.step_seconds(len(running) + 1, context, ()) * self.slowdown

    @property
    def prefill_tokens_per_s(self) -> float:
        """Rate at which it computes prompts."""
        return self._prefill_rate / self.slowdown

    # --- steps -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Deliver the tokens of the steps of a leap that have been computed by now."""
        leap = self._leap
        if leap is None:
            return
        steps = self._count_steps(leap, self._simulation.now_ns - leap.started_ns)
        if steps:
            duration_ns = self._leap_ns(leap, steps)
            self._leap = _Leap(
                leap.started_ns + duration_ns,
                leap.steps - steps,
                leap.rows,
                leap.context_tokens + leap.rows * steps,
            )
            self._apply(steps, duration_ns)

    def _begin(self, run: int) -> None:
        """Begin a step or a leap, if there is work."""
        if run != self._run:
            return
        self._run += 1
        scheduler, simulation = self.scheduler, self._simulation
        if self._is_macro and (steps := scheduler.count_plain_decodes()) >= MIN_LEAP_STEPS:
            context = sum(seq.length for seq in scheduler.running)
            self._leap = leap = _Leap(simulation.now_ns, steps, len(scheduler.running), context)
            simulation.call_at(
                leap.started_ns + self._leap_ns(leap, steps),
                partial(self._complete_leap, self._run),
                STEP_PRIORITY,
            )
            return
        plan = scheduler.schedule(simulation.now)
        if plan.rows:
            self._compute(plan, simulation.now_ns)
            return
        scheduler.commit(StepResult([]))
        self._is_busy = False
        require(not scheduler.has_work, f"requests wait at {self.name} although no step can run")

    def _compute(self, plan: StepPlan, started_ns: int) -> None:
        """Let the step end when its price has passed."""
        decodes, context, prefills = plan.count_work()
        seconds = self._cost.step_seconds(decodes, context, prefills) * self.slowdown
        duration_ns = max(1, round(seconds * NS_PER_S))
        self.busy_ns += duration_ns
        self.prefill_tokens += sum(count for count, _ in prefills)
        self._simulation.call_at(
            started_ns + duration_ns, partial(self._complete, plan, self._run), STEP_PRIORITY
        )

    def _complete(self, plan: StepPlan, run: int) -> None:
        if run != self._run:
            return
        tokens = [SAMPLED_TOKEN if samples else -1 for samples in plan.sample_counts]
        corrupt = [each.block for each in plan.block_restores] if self.is_cache_corrupt else []
        stale = self._list_holders(corrupt) if corrupt else ()
        for update in self.scheduler.commit(StepResult(tokens, corrupt_blocks=corrupt)):
            if update.tokens or update.finish_reason:
                require(update.seq not in stale, f"{update.seq.id} gets a token of a corrupt block")
                self.decode_tokens += len(update.tokens)
                self._on_tokens(update.seq, len(update.tokens), update.finish_reason is not None)
        if run == self._run:  # a listener may have restarted it
            self._begin(run)

    def _list_holders(self, blocks: list[int]) -> tuple[Sequence, ...]:
        """Return the running sequences that have one of these blocks."""
        return tuple(
            seq
            for seq in self.scheduler.running
            if any(block in table for table in seq.block_tables for block in blocks)
        )

    # --- leaps -----------------------------------------------------------------------------------

    def _leap_ns(self, leap: _Leap, steps: int) -> int:
        """Return the time of the first `steps` steps of a leap."""
        context = leap.context_tokens + leap.rows * (steps - 1) // 2
        seconds = steps * self._cost.step_seconds(leap.rows, context, ()) * self.slowdown
        return max(1, round(seconds * NS_PER_S))

    def _count_steps(self, leap: _Leap, elapsed_ns: int) -> int:
        """Return how many steps of a leap have ended after this time."""
        low, high = 0, leap.steps
        low_ns, high_ns = 0, self._leap_ns(leap, high)
        if elapsed_ns >= high_ns:
            return high
        while low + 1 < high:  # steps are of nearly equal length
            guess = low + (elapsed_ns - low_ns) * (high - low) // (high_ns - low_ns)
            guess = min(max(guess, low + 1), high - 1)
            guess_ns = self._leap_ns(leap, guess)
            if guess_ns <= elapsed_ns:
                low, low_ns = guess, guess_ns
            else:
                high, high_ns = guess, guess_ns
        return low

    def _complete_leap(self, run: int) -> None:
        if run != self._run or self._leap is None:
            return
        leap, self._leap = self._leap, None
        if leap.steps:
            self._apply(leap.steps, self._simulation.now_ns - leap.started_ns)
        if run == self._run:
            self._begin(run)

    def _apply(self, steps: int, duration_ns: int) -> None:
        """Apply decode steps and deliver their tokens."""
        self.busy_ns += duration_ns
        self.scheduler.skip_decodes(steps, SAMPLED_TOKEN)
        running = tuple(self.scheduler.running)
        self.decode_tokens += steps * len(running)
        for seq in running:
            self._on_tokens(seq, steps, False)  # noqa: FBT003 - whether it has ended

    def _end_leap(self) -> None:
        """End a leap at the step that is being computed, which ends as any other step."""
        self.settle()
        leap = self._leap
        if leap is not None:
            self._leap = None
            self._run += 1
            self._compute(self.scheduler.schedule(leap.started_ns / NS_PER_S), leap.started_ns)
