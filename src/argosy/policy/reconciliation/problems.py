"""Problems of a fleet: for each kind its severity, its sentence, and its place in the chain of causes.

`argosy status`, the event log, the admin API and the console all show the sentences of this table.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from argosy.policy.replica_status import ReplicaStatus

MAX_REASON_CHARACTERS = 1000
"""Length to which the detail of a sentence is cut, since replicas and the clients of gateways cause parts of it."""


class Severity(enum.StrEnum):
    """Urgency of a problem for an operator, most urgent first."""

    PAGE = "page"
    """Act now: requests fail, or will fail after the next fault."""
    TICKET = "ticket"
    """Act in the next days: the fleet heals itself, or waits for a decision."""
    NOTE = "note"
    """Do nothing: a person decided it, or it ends by itself."""


class ProblemKind(enum.StrEnum):
    """Kinds of problems, causes before the symptoms that they explain."""

    STORE = "store"
    CONTROLLER = "controller"
    START = "start"
    ENGINE = "engine"
    HUNG = "hung"
    SILENT = "silent"
    CORE_EXIT = "core_exit"
    CRASH = "crash"
    WARM_UP = "warm_up"
    EJECTED = "ejected"
    DRAINED = "drained"
    DRAINS = "drains"
    STOPPED_SERVING = "stopped_serving"
    UNREACHABLE = "unreachable"
    POOL_SHORT = "pool_short"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"
    ROLLOUT_WAITS = "rollout_waits"
    POOL_STARTS = "pool_starts"
    ROLLOUT_ABORTED = "rollout_aborted"
    OTHER_VERSION = "other_version"


class ProblemRow(NamedTuple):
    """Meaning of a kind."""

    severity: Severity
    sentence: str
    """Clause about a replica with the subject "it", or a whole sentence about anything else. `{reason}` is the detail
    that was observed."""


PROBLEMS: Mapping[ProblemKind, ProblemRow] = {
    ProblemKind.STORE: ProblemRow(
        Severity.PAGE,
        "The store cannot be written, so nothing is recorded, healed or scaled. What serves, serves on. {reason}",
    ),
    ProblemKind.CONTROLLER: ProblemRow(
        Severity.PAGE,
        "No controller leads the fleet {reason}, so nothing is started, healed or scaled."
        " Start one with `argosy up`.",
    ),
    ProblemKind.START: ProblemRow(Severity.PAGE, "{reason}"),
    ProblemKind.ENGINE: ProblemRow(Severity.PAGE, "its engine failed and is not started again"),
    ProblemKind.HUNG: ProblemRow(Severity.PAGE, "{reason}"),
    ProblemKind.SILENT: ProblemRow(
        Severity.PAGE, "it does not answer, and is restarted after {reason} without an answer"
    ),
    ProblemKind.CORE_EXIT: ProblemRow(
        Severity.TICKET, "its engine core ended and is started again: {reason}"
    ),
    ProblemKind.CRASH: ProblemRow(Severity.TICKET, "{reason}"),
    ProblemKind.WARM_UP: ProblemRow(Severity.PAGE, "its warm-up failed: {reason}"),
    ProblemKind.EJECTED: ProblemRow(
        Severity.PAGE, "gateways send it no requests, because {reason}"
    ),
    ProblemKind.DRAINED: ProblemRow(Severity.NOTE, "it is {reason}"),
    ProblemKind.DRAINS: ProblemRow(Severity.TICKET, "it drains by its own report"),
    ProblemKind.STOPPED_SERVING: ProblemRow(Severity.PAGE, "it has stopped serving{reason}"),
    ProblemKind.UNREACHABLE: ProblemRow(Severity.PAGE, "a gateway cannot reach it: {reason}"),
    ProblemKind.POOL_SHORT: ProblemRow(Severity.PAGE, "In the pool {reason}."),
    ProblemKind.ROLLING_BACK: ProblemRow(
        Severity.TICKET, "The rollout of {reason}, so all users return to the old version."
    ),
    ProblemKind.ROLLED_BACK: ProblemRow(
        Severity.TICKET,
        "The rollout of {reason}. The declared version is not tried again by itself.",
    ),
    ProblemKind.ROLLOUT_WAITS: ProblemRow(
        Severity.TICKET, "The rollout of {reason}, and waits for a person."
    ),
    ProblemKind.POOL_STARTS: ProblemRow(Severity.NOTE, "In the pool {reason}."),
    ProblemKind.ROLLOUT_ABORTED: ProblemRow(
        Severity.NOTE, "The rollout of {reason}. `argosy rollout resume` permits it again."
    ),
    ProblemKind.OTHER_VERSION: ProblemRow(
        Severity.NOTE, "{reason}. `argosy up` upgrades the fleet to the installed version."
    ),
}
"""All kinds. The documentation shows this table."""

_STATUS_KINDS = {
    ReplicaStatus.EJECTED: ProblemKind.EJECTED,
    ReplicaStatus.UNREACHABLE: ProblemKind.UNREACHABLE,
    ReplicaStatus.DRAINING: ProblemKind.DRAINED,
    ReplicaStatus.CORDONED: ProblemKind.DRAINED,
    ReplicaStatus.STARTING: ProblemKind.POOL_STARTS,
    ReplicaStatus.BACKOFF: ProblemKind.POOL_STARTS,
}


def status_severity(status: ReplicaStatus) -> Severity | None:
    """Return the severity of a replica's status at one gateway; None if it is ready."""
    kind = _STATUS_KINDS.get(status)
    return None if kind is None else PROBLEMS[kind].severity


_KIND_RANKS = {kind: rank for rank, kind in enumerate(ProblemKind)}
_SEVERITY_RANKS = {severity: rank for rank, severity in enumerate(Severity)}


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A problem of a fleet at one moment."""

    kind: ProblemKind
    severity: Severity
    text: str
    """Cause and effect in one or two sentences."""
    pool: str = ""
    replica: str = ""


class PoolCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas of a pool in numbers, of all versions together."""

    desired: int
    """Replicas that there shall be."""
    minimum: int
    """Fewest replicas that shall serve."""
    serving: int
    starting: int
    """Replicas that start, or wait for it, and have no problem."""

    noun: str = "replica"
    """Name of one of them."""

    def __str__(self) -> str:
        starts = f", {self.starting} start{'s' if self.starting == 1 else ''}"
        noun = self.noun if self.desired == 1 else f"{self.noun}s"
        verb = "serves" if 1 in {self.serving, self.desired} else "serve"
        serves = f"{self.serving} of {self.desired} {noun} {verb}"
        return serves + (starts if self.starting else "")


def describe_problem(kind: ProblemKind, reason: str = "") -> str:
    """Return the sentence of a problem, or the clause of a replica's problem."""
    return PROBLEMS[kind].sentence.format(reason=reason[:MAX_REASON_CHARACTERS])


def build_problem(
    kind: ProblemKind, reason: str = "", *, pool: str = "", replica: str = ""
) -> Problem:
    """Return a problem. If it is one of a replica, `reason` is its clause with the subject "it"."""
    text = f"Replica {replica}: {reason}." if replica else describe_problem(kind, reason)
    return Problem(
        kind=kind, severity=PROBLEMS[kind].severity, text=text, pool=pool, replica=replica
    )


def order_problems(
    problems: Iterable[Problem], pools: Mapping[str, PoolCounts]
) -> Sequence[Problem]:
    """Return the problems, most severe first, and causes before symptoms, with those of pools that lack replicas.

    What keeps a replica of a pool from serving is as severe as the lack that it causes. While the store cannot be
    written, the silence of the controller follows from it.
    """
    found = list(problems)
    if any(each.kind is ProblemKind.STORE for each in found):
        found = [each for each in found if each.kind is not ProblemKind.CONTROLLER]
    short = {name for name, counts in pools.items() if counts.serving < counts.minimum}
    causes = {each.pool for each in found if each.replica}
    for name in sorted(short):
        counts = pools[name]
        only_starts = name not in causes and counts.serving + counts.starting >= counts.minimum
        kind = ProblemKind.POOL_STARTS if only_starts else ProblemKind.POOL_SHORT
        found.append(
            build_problem(kind, f"{name}, {counts} (at least {counts.minimum})", pool=name)
        )
    raised = [
        msgspec.structs.replace(each, severity=Severity.PAGE)
        if each.replica and each.pool in short
        else each
        for each in found
    ]
    return sorted(
        raised,
        key=lambda each: (
            _SEVERITY_RANKS[each.severity],
            _KIND_RANKS[each.kind],
            each.pool,
            each.replica,
        ),
    )
