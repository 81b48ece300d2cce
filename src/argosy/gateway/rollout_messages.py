"""Messages between the controller and the gateways about the versions of a pool during a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from argosy.deployment import ReplicaConfig
from argosy.policy.rollout import Comparison, OutcomeBatch, RequestOutcome
from argosy.policy.traffic import PoolRoute

ROUTE_PREFIX = "route/"
"""Beginning of the names of the documents of a fleet that are the routes of its pools."""


class PublishedVersions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Versions of the pool of a model, and which of them serves whom."""

    model: str
    route: PoolRoute
    """The route as the controller has stored it. A gateway follows the latest one that it knows."""
    replicas: Mapping[str, Sequence[ReplicaConfig]] = {}
    """Replicas of each version except the stable one, by digest. Those of the stable version are the model's."""
    comparison: Comparison | None = None
    """Measurements to make; None while no step has traffic of both versions."""


class OutcomeQuery(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Question of the controller for measurements."""

    model: str
    rollout: str = ""
    """Rollout whose batches are read. Empty for the current one."""
    gateway: str = ""
    """Gateway process that sent the batches up to `after`. Another process sends all that it has."""
    after: int = 0
    """Sequence number of the last batch that the controller has stored."""
    wants_history: bool = False
    """Whether it also asks for the recent requests of the stable version, from which it computes the baseline."""


class OutcomeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Answer of a gateway."""

    gateway: str
    """Id of the gateway's process, as in its batches."""
    batches: Sequence[OutcomeBatch] = ()
    history: Sequence[RequestOutcome] = ()
    longest_request_s: float = 0.0
    """Duration of the longest recent request of the model."""
    compared_answers: int = 0
    """Answers to copied requests without random sampling that were compared with the original ones, in this rollout."""
    equal_answers: int = 0
    """Number of these answers that have the same tokens."""
