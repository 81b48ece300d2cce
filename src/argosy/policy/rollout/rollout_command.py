"""Commands of people to a rollout, and which of several is followed."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class CommandKind(enum.StrEnum):
    """Command of `argosy rollout`."""

    ABORT = "abort"
    PROMOTE = "promote"
    PAUSE = "pause"
    RESUME = "resume"
    """Continue a paused rollout, or permit another attempt with a version that was rolled back."""


_RANK = {kind: rank for rank, kind in enumerate(CommandKind)}


class RolloutCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Command of one person.

    Raises:
        ValueError: It is forced without a reason.
    """

    kind: CommandKind
    by: str
    reason: str = ""
    force: bool = False
    """Whether to go on without evidence, or with a spent error budget."""
    rollout: str = ""
    """Id of the rollout that it was given for. It does nothing to a later one. Empty for the current one."""

    def __post_init__(self) -> None:
        if self.force and not self.reason.strip():
            raise ValueError("a forced command needs a reason; add one")


def order_commands(commands: Sequence[RolloutCommand]) -> list[RolloutCommand]:
    """Return commands in the order in which they count: abort, then promote, then the latest pause or resume."""
    latest: dict[int, RolloutCommand] = {}
    for command in commands:
        rank = min(_RANK[command.kind], _RANK[CommandKind.PAUSE])
        latest[rank] = command
    return [latest[rank] for rank in sorted(latest)]
