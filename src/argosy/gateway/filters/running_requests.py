"""Running requests by caller and model, to which changed limits are applied."""

from __future__ import annotations

from collections.abc import Callable

from argosy.gateway.filters.limit_filter_state import LimitFilterState, LimitSet
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import RequestContext
from argosy.policy import is_exceeded


def caller_key(principal: Principal, model: str) -> tuple[str, ...]:
    """Return the fields by which limits apply to a request."""
    return principal.key, principal.user, principal.project, principal.organisation, model


class RunningRequests:
    """Reservations of the requests that have been admitted and have not ended."""

    def __init__(self) -> None:
        self._states: dict[RequestContext, LimitFilterState] = {}

    def add(self, state: LimitFilterState) -> None:
        """Add the reservation of an admitted request."""
        self._states[state.context] = state

    def find(self, context: RequestContext) -> LimitFilterState:
        """Return the reservation of a running request."""
        return self._states[context]

    def remove(self, context: RequestContext) -> LimitFilterState:
        """Remove a request that has ended, and return its reservation."""
        return self._states.pop(context)

    def update_limits(
        self, get_limit_set: Callable[[Principal, str], LimitSet], now: float
    ) -> None:
        """Apply limits that have changed to the requests.

        Nothing changes for a request whose limits were raised, or lowered to no less than what is in use.

        Args:
            get_limit_set: Returns the limits that apply to a principal's requests for a model.
            now: Seconds since the epoch.
        """
        # By limits, because the same ones apply to all requests of a caller for a model, and there may be thousands.
        exceeded: dict[int, bool] = {}
        for context, state in tuple(self._states.items()):
            limit_set = get_limit_set(context.principal, context.pool.model)
            has_exceeded = exceeded.get(id(limit_set))
            if has_exceeded is None:
                has_exceeded = any(is_exceeded(limit.meter, now) for limit in limit_set.meters)
                exceeded[id(limit_set)] = has_exceeded
            if has_exceeded or state.limit_set.meters != limit_set.meters:
                state.change_limits(limit_set)
            else:
                state.limit_set = limit_set
