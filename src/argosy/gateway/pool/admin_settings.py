"""Decisions of operators about a replica, on top of the settings file."""

from __future__ import annotations

from typing import NamedTuple

from argosy.policy import AdminState
from argosy.store import ReplicaSetting


class AdminSettings(NamedTuple):
    """Effective decisions about one replica."""

    state: AdminState = AdminState.ACTIVE
    weight: float = 1.0
    setting: ReplicaSetting | None = None
    """Latest decision of an operator; None if only the settings file applies."""

    def with_setting(self, setting: ReplicaSetting | None) -> AdminSettings:
        """Return the settings file's values with those of an operator's decision in their place."""
        if setting is None:
            return self
        return AdminSettings(
            self.state if setting.state is None else AdminState(setting.state),
            self.weight if setting.weight is None else setting.weight,
            setting,
        )

    @property
    def description(self) -> str:
        """Name of the operator who decided, with the reason."""
        if self.setting is None:
            return "by the settings file"
        reason = f": {self.setting.reason}" if self.setting.reason else ""
        return f"by {self.setting.changed_by}{reason}"

    def move_after_s(self, wall_now: float) -> float:
        """Return the seconds until streams of a draining replica move, at a time in seconds since the epoch."""
        setting = self.setting
        return 0.0 if setting is None else setting.changed_at + setting.grace_s - wall_now


DEFAULT_ADMIN = AdminSettings()
"""Replica in service with the same share as others."""
