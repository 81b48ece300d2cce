"""How often each user has had each event, so that the same users on one side do not look like a regression.

Where routing is sticky, the unit of the comparison is the user. A heavy user with many errors, on whichever side, would
otherwise be taken for a worse version.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from argosy.policy.rollout.baseline import Baseline, score
from argosy.policy.rollout.metrics import EVENTS, RequestOutcome

PRIOR_REQUESTS = 50.0
"""Weight of the mean rate of all users, in requests of one user."""
MAX_USERS = 10_000


class UserRates(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen rates of events by user.

    They are not updated during a rollout, which could hide a regression. Store them with it: a gateway that restarts
    without them would count the requests of all users alike.
    """

    means: tuple[float, ...] = (1.0,) * len(EVENTS)
    """Mean rate of each event. Only ratios of rates matter."""
    users: Mapping[str, tuple[float, ...]] = {}
    """Rates of known users. Others have the mean rates."""

    def expected(self, key: tuple[str, str], event: int) -> float:
        """Return the expected number of events of one request. It is 1 for events in which users do not differ."""
        if not EVENTS[event].by_user:
            return 1.0
        return self.users.get(user_name(key), self.means)[event]


class UserHistory:
    """Counts events of the stable version by user, for a bounded number of users."""

    def __init__(self, baseline: Baseline, max_users: int = MAX_USERS) -> None:
        """Create a history of events that are defined by a baseline."""
        self._baseline = baseline
        self._max_users = max_users
        self._users: dict[str, list[float]] = {}
        """Requests, then events, of each user."""

    def record(self, outcome: RequestOutcome) -> None:
        """Add a request of the stable version."""
        if not outcome.is_valid:
            return
        name = user_name(outcome.key)
        counts = self._users.get(name)
        if counts is None:
            if len(self._users) >= self._max_users:
                self._forget_light_users()
            counts = self._users.setdefault(name, [0.0] * (1 + len(EVENTS)))
        counts[0] += 1.0
        for event, _, has_occurred in score(outcome, self._baseline):
            counts[1 + event] += has_occurred

    def freeze(self) -> UserRates:
        """Return the rates, drawn towards the mean the less is known of a user."""
        requests = sum(counts[0] for counts in self._users.values())
        if not requests:
            return UserRates()
        means = tuple(
            max(sum(counts[1 + event] for counts in self._users.values()), 0.5) / requests
            for event in range(len(EVENTS))
        )
        return UserRates(
            means=means,
            users={
                name: tuple(
                    (counts[1 + event] + PRIOR_REQUESTS * mean) / (counts[0] + PRIOR_REQUESTS)
                    for event, mean in enumerate(means)
                )
                for name, counts in self._users.items()
            },
        )

    def _forget_light_users(self) -> None:
        while len(self._users) >= self._max_users:
            halved = {name: [each / 2 for each in self._users[name]] for name in self._users}
            self._users = {name: counts for name, counts in halved.items() if counts[0] >= 1.0}


def user_name(key: tuple[str, str]) -> str:
    """Return a sticky key as one string."""
    return f"{len(key[0])}:{key[0]}{key[1]}"
