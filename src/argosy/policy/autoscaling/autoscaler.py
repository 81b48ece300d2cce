"""The autoscaler: decides how many replicas a pool shall have."""

from __future__ import annotations

import math

import msgspec

from argosy.policy.autoscaling.decision import (
    DemandBasis,
    PoolObservation,
    ScalingAction,
    ScalingArithmetic,
    ScalingDecision,
    ScalingOwner,
    describe_need,
)
from argosy.policy.autoscaling.demand_history import (
    MAX_PEAK_WINDOW_S,
    PEAK_MEAN_S,
    SLOW_WINDOW_S,
    DemandHistory,
    PeakWindow,
    TrendForecast,
)
from argosy.policy.autoscaling.settings import AutoscalerSettings, scheduled_minimum

BURST_LOAD = 0.95
"""Load of the ready replicas above which the demand of the last seconds counts."""
BACKLOG_AGE_S = 1.0
"""Age of the oldest queued request from which the queue counts as a backlog."""
FAR_OVER_FRACTION = 0.6
"""Part of the permitted load below which several replicas are removed at once."""
MAX_REPLACED_FRACTION = 0.25
"""Failing replicas that are replaced by further ones, as a part of the ready ones."""


class AutoscalerState(msgspec.Struct):
    """Memory of an autoscaler. It can be stored as JSON or MessagePack, and resumed by another controller."""

    demand: DemandHistory = msgspec.field(default_factory=DemandHistory)
    kv_peaks: PeakWindow = msgspec.field(default_factory=PeakWindow)
    trend: TrendForecast = msgspec.field(default_factory=TrendForecast)
    observed_at: float | None = None
    """Time of the last usable observation."""
    observed_since: float | None = None
    """Time since which no observation was missing."""
    active_at: float | None = None
    """When the pool last had a request, or was starting."""
    short_at: float | None = None
    """When more replicas were last needed than were ready or starting."""
    removed_at: float | None = None
    """When a replica was last removed."""
    last_decision: ScalingDecision | None = None


class Autoscaler:
    """Autoscaler of one pool. Call `decide` each 5 s, and at once when a request waits for a pool without replicas.

    It reads no clock. The same observations give the same decisions, also if the autoscaler is replaced by one that
    continues with its state.
    """

    def __init__(self, settings: AutoscalerSettings, state: AutoscalerState | None = None) -> None:
        self.settings = settings
        self.state = AutoscalerState() if state is None else state

    def decide(self, observation: PoolObservation) -> ScalingDecision:
        """Decide about the pool. An observation that is not newer than the last one changes nothing.

        Args:
            observation: What is known of the pool, with the arrivals since the previous observation.
        """
        last = self.state.last_decision
        if last is not None and observation.at <= last.at:
            return last
        defect = observation.find_defect(self.settings.stale_after_s)
        if defect is None:
            self._record(observation)
        rules = _Rules(self.settings, self.state, observation, defect)
        recommended, reason = rules.run()
        decision = self._apply_owner(observation, recommended, reason, rules.arithmetic)
        self.state.last_decision = decision
        return decision

    def _record(self, observation: PoolObservation) -> None:
        state, at = self.state, observation.at
        gap_s = math.inf if state.observed_at is None else at - state.observed_at
        if gap_s > self.settings.stale_after_s:
            state.observed_since = state.active_at = at
            state.demand.forget_samples()
        state.observed_at = at
        end = at - sum(arrival.duration_s for arrival in observation.arrivals)
        for arrival in observation.arrivals:
            end += arrival.duration_s
            state.demand.add(end, arrival.duration_s, arrival.tokens)
        state.kv_peaks.add(at, observation.kv_used_replicas)
        recent = state.demand.mean(PEAK_MEAN_S)
        if recent.seconds >= PEAK_MEAN_S:
            state.trend.update(at, recent.tokens_per_s, observation.startup_s)
        idle_replicas = observation.failing_replicas + observation.sleeping_replicas
        is_starting = observation.desired_replicas > idle_replicas
        if (
            (is_starting and not observation.ready_replicas)  # a start ends, also if clients left
            or observation.queued_requests
            or observation.running_requests
            or any(arrival.tokens for arrival in observation.arrivals)
        ):
            state.active_at = at

    def _apply_owner(
        self,
        observation: PoolObservation,
        recommended: int,
        reason: str,
        arithmetic: ScalingArithmetic,
    ) -> ScalingDecision:
        settings, desired = self.settings, observation.desired_replicas
        manual = observation.manual_scale
        target, owner = recommended, ScalingOwner.AUTOSCALER
        if settings.is_advisory:
            target, owner = desired, ScalingOwner.DECLARATION
            reason = f"Advisory only, the count stays at {target}. {reason}"
        if manual is not None:
            target = min(max(manual.replicas, settings.min_replicas), settings.max_replicas)
            owner = ScalingOwner.OPERATOR
            reason = (
                f"Paused, because {manual.set_by} scaled to {manual.replicas} by hand; "
                f"the autoscaler would have {recommended} replica{'' if recommended == 1 else 's'}."
            )
        action = ScalingAction.HOLD
        if target != desired:
            action = ScalingAction.SCALE_UP if target > desired else ScalingAction.SCALE_DOWN
        if action is ScalingAction.SCALE_DOWN and owner is ScalingOwner.AUTOSCALER:
            self.state.removed_at = observation.at
        if observation.rollout_in_progress and action is not ScalingAction.HOLD:
            reason += " The rollout divides this number between its versions."
        return ScalingDecision(
            at=observation.at,
            action=action,
            owner=owner,
            target=target,
            recommended=recommended,
            spares=settings.spares if target else 0,
            reason=reason,
            arithmetic=arithmetic,
        )


class _Rules:
    """The rules, applied to one observation. Call `run` once, then read `arithmetic`."""

    def __init__(
        self,
        settings: AutoscalerSettings,
        state: AutoscalerState,
        observation: PoolObservation,
        defect: str | None,
    ) -> None:
        self._settings = settings
        self._state = state
        self._observation = observation
        self._defect = defect
        self._lead_s = observation.startup_s if math.isfinite(observation.startup_s) else 0.0
        desired, failing = observation.desired_replicas, observation.failing_replicas
        self._supply = max(0, desired - failing)
        """Replicas that serve or will serve, with those that sleep."""
        minimum = max(
            settings.min_replicas,
            scheduled_minimum(settings.schedule, observation.at, max(0.0, self._lead_s)),
        )
        self.arithmetic = ScalingArithmetic(
            desired_replicas=desired,
            ready_replicas=observation.ready_replicas,
            starting_replicas=max(
                0, self._supply - observation.ready_replicas - observation.sleeping_replicas
            ),
            failing_replicas=failing,
            sleeping_replicas=observation.sleeping_replicas,
            minimum=minimum,
            maximum=settings.max_replicas,
        )

    def run(self) -> tuple[int, str]:
        """Return the number of replicas and the reason."""
        desired = self._observation.desired_replicas
        target, reason = self._decide()
        minimum, maximum = self.arithmetic.minimum, self.arithmetic.maximum
        if target < minimum:
            target, reason = minimum, f"the minimum is {minimum} now ({reason})"
        elif target > maximum:
            target, reason = maximum, f"the maximum is {maximum} ({reason})"
        verb = f"Hold {target}" if target == desired else f"Scale from {desired} to {target}"
        return target, f"{verb}: {reason}."

    def _decide(self) -> tuple[int, str]:
        observation, state = self._observation, self._state
        desired = observation.desired_replicas
        if self._defect is not None:
            if not desired and observation.queued_requests:
                return 1, f"requests wait and there is no replica, although {self._defect}"
            return desired, self._defect
        needed, reason = self._compute_need()
        if needed > self._supply:
            state.short_at = observation.at
            return self._limit_increase(needed), reason
        idle_s = observation.at - (state.active_at or 0.0)
        if not self.arithmetic.minimum and idle_s >= self._settings.idle_s:
            if observation.rollout_in_progress:
                return desired, f"it is idle for {idle_s:.0f} s, but a rollout is in progress"
            return 0, f"it has had no request for {idle_s:.0f} s"
        held = self._find_objection(needed)
        if held is not None:
            return desired, f"{reason}; {held}"
        removed = self._count_removable(needed)
        peak, window_s = self.arithmetic.peak_tokens_per_s, self.arithmetic.peak_window_s
        remaining = self._supply - removed
        serving = "1 replica serves" if remaining == 1 else f"{remaining} replicas serve"
        return desired - removed, (
            f"the peak of {window_s:.0f} s, {peak:,.1f} tokens/s, is at most "
            f"{self._settings.max_down_fraction:.0%} of what {serving}"
        )

    def _compute_need(self) -> tuple[int, str]:
        """Fill the arithmetic, and return how many working replicas are needed and why."""
        settings, observation, state = self._settings, self._observation, self._state
        desired = observation.desired_replicas
        capacity = observation.capacity_tokens_per_s or None
        slow = state.demand.mean(SLOW_WINDOW_S)
        demand, basis = slow.tokens_per_s, DemandBasis.MEAN
        burst = state.demand.burst(slow)
        forecast = state.trend.usable_forecast if settings.uses_trend else None
        awakable = observation.ready_replicas + observation.sleeping_replicas
        if burst and burst > BURST_LOAD * awakable * (capacity or math.inf):
            demand, basis = burst, DemandBasis.BURST
        if forecast is not None and forecast > demand:
            demand, basis = forecast, DemandBasis.TREND
        has_backlog = observation.queue_age_s > BACKLOG_AGE_S
        backlog = observation.queued_tokens if has_backlog else 0.0
        for_tokens = 0.0
        if capacity is not None:
            rate = (1.0 + settings.spare_fraction) * demand + backlog / settings.drain_s
            for_tokens = rate / capacity
        for_kv = observation.kv_used_replicas / settings.kv_limit
        needed = max(math.ceil(for_tokens - 1e-9), math.ceil(for_kv - 1e-9))
        has_arrivals = any(arrival.tokens for arrival in observation.arrivals)
        if observation.queued_requests or (has_arrivals and not self._supply):
            needed = max(needed, 1)  # also for requests that were refused until a replica serves
        elif not desired:
            needed = 0  # past demand does not start a pool again
        window_s = min(max(settings.down_window_s, 2.0 * observation.startup_s), MAX_PEAK_WINDOW_S)
        since = observation.at - window_s
        self.arithmetic = msgspec.structs.replace(
            self.arithmetic,
            demand_tokens_per_s=demand,
            demand_basis=basis,
            spare_fraction=settings.spare_fraction,
            backlog_tokens=backlog,
            drain_s=settings.drain_s,
            capacity_tokens_per_s=capacity,
            needed_for_tokens=for_tokens,
            needed_for_kv=for_kv,
            needed=needed,
            peak_tokens_per_s=state.demand.peaks.peak(since),
            peak_kv_replicas=state.kv_peaks.peak(since),
            peak_window_s=window_s,
            trend_error=state.trend.relative_error,
        )
        reason = describe_need(self.arithmetic)
        if needed <= self._supply and self._is_underestimated():
            needed = self._supply + 1
            age_s = observation.queue_age_s
            reason += (
                f", but a request has waited for {age_s:.0f} s although no replica is starting"
            )
        self.arithmetic = msgspec.structs.replace(self.arithmetic, needed=needed)
        return needed, reason

    def _is_underestimated(self) -> bool:
        """Return whether the queue proves that the replicas serve less than is assumed."""
        settings, observation, short_at = self._settings, self._observation, self._state.short_at
        return (
            observation.queue_age_s > settings.drain_s
            and observation.ready_replicas >= self._supply > 0
            and (short_at is None or observation.at - short_at >= settings.drain_s)
        )

    def _limit_increase(self, needed: int) -> int:
        """Return the replica count for a need above the supply: at most twice as many, or two more.

        Failing replicas are replaced, but only as many as the ready ones can vouch for: a pool whose replicas all fail
        would otherwise grow to its maximum.
        """
        observation = self._observation
        desired = observation.desired_replicas
        max_replaced = max(1, math.floor(MAX_REPLACED_FRACTION * observation.ready_replicas))
        target = needed + min(observation.failing_replicas, max_replaced)
        return max(desired, min(target, max(2 * desired, desired + 2)))

    def _find_objection(self, needed: int) -> str | None:
        """Return why no replica may be removed now, as a clause; None if one may."""
        settings, observation, state = self._settings, self._observation, self._state
        a, at = self.arithmetic, observation.at
        waking = min(needed - a.ready_replicas, a.sleeping_replicas)
        if waking > 0:
            wake_s, start = observation.wake_s, f"a start takes {observation.startup_s:.0f} s"
            wake = f"in {wake_s:.1f} s, where" if wake_s else "first, and"
            return f"{waking} of {a.sleeping_replicas} that sleep wake up {wake} {start}"
        if self._supply <= max(a.minimum, 1) or needed >= self._supply:
            return "none can be removed"
        if observation.queue_age_s > BACKLOG_AGE_S:
            return "requests wait"
        if at - (at if state.observed_since is None else state.observed_since) < a.peak_window_s:
            return f"the demand is not known for {a.peak_window_s:.0f} s yet"
        is_far_over = self._would_hold(self._supply - 1, FAR_OVER_FRACTION)
        wait_s = settings.down_window_s / (2.0 if is_far_over else 1.0)
        if state.short_at is not None and at - state.short_at < wait_s:
            return f"replicas were missing within the last {wait_s:.0f} s"
        if state.removed_at is not None and at - state.removed_at < settings.down_interval_s:
            return f"one was removed within the last {settings.down_interval_s:.0f} s"
        if not self._would_hold(self._supply - 1, 1.0):
            return f"{self._supply - 1} would not hold the peak of {a.peak_window_s:.0f} s"
        return None

    def _would_hold(self, replicas: int, fraction: float) -> bool:
        """Return whether `replicas` hold the peak with this part of the permitted load."""
        a = self.arithmetic
        max_kv = self._settings.kv_limit * fraction * replicas
        if a.peak_kv_replicas > max_kv:
            return False
        if a.capacity_tokens_per_s is None:
            return not a.peak_tokens_per_s
        max_tokens_per_s = (
            self._settings.max_down_fraction * fraction * replicas * a.capacity_tokens_per_s
        )
        return a.peak_tokens_per_s <= max_tokens_per_s

    def _count_removable(self, needed: int) -> int:
        """Return how many replicas are removed: one, or up to a quarter if far fewer would do."""
        floor = max(self.arithmetic.minimum, needed, 1)
        removed = 1
        while (
            removed < self._supply // 4
            and self._supply - removed - 1 >= floor
            and self._would_hold(self._supply - removed - 1, FAR_OVER_FRACTION)
        ):
            removed += 1
        return removed
