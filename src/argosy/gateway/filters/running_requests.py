"""Running requests by caller and model, to which changed limits are applied."""

from __future__ import annotations

from collections.abc import Callable

from argosy.gateway.filters.limit_filter_state import LimitFilterState, LimitSet
from argosy.gateway.principal import Principal
from argosy.policy import is_exceeded


def caller_key(principal: Principal, model: str) -> tuple[str, ...]:
    """Return the fields by which limits apply to a request."""
    return principal.key, principal.user, principal.project, principal.organisation, model


class RunningRequests:
    """States of the requests that have been admitted and have not ended."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, ...], set[LimitFilterState]] = {}
        """States by caller and model, because the same limits apply to all requests with one key."""

    def add(self, state: LimitFilterState) -> None:
        """Add the state of an admitted request."""
        self._states.setdefault(_state_key(state), set()).add(state)

    def remove(self, state: LimitFilterState) -> None:
        """Remove the state of a request that has ended."""
        key = _state_key(state)
        states = self._states[key]
        states.discard(state)
        if not states:
            del self._states[key]

    def update_limits(
        self, get_limit_set: Callable[[Principal, str], LimitSet], now: float
    ) -> None:
        """Apply limits that have changed to the requests.

        Nothing changes for a request whose limits were raised, or lowered to no less than what is in use.

        Args:
            get_limit_set: Returns the limits that apply to a principal's requests for a model.
            now: Seconds since the epoch.
        """
        for states in [tuple(states) for states in self._states.values()]:
            context = states[0].context
            limit_set = get_limit_set(context.principal, context.pool.model)
            has_exceeded = any(is_exceeded(limit.meter, now) for limit in limit_set.meters)
            for state in states:
                if has_exceeded or state.limit_set.meters != limit_set.meters:
                    state.change_limits(limit_set)
                else:
                    state.limit_set = limit_set


def _state_key(state: LimitFilterState) -> tuple[str, ...]:
    return caller_key(state.context.principal, state.context.pool.model)
