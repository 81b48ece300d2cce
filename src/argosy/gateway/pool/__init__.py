"""The replicas of a model: what is known of each, how it is found out, and which one a request gets."""

from argosy.gateway.pool.background import Care, look_after
from argosy.gateway.pool.dns_discovery import Discover, Discovery, LookUp, look_up
from argosy.gateway.pool.pool import Picked, Pool
from argosy.gateway.pool.prober import NOT_THERE, PROBE_TIMEOUT_S, Prober
from argosy.gateway.pool.replica_endpoint import Replica

__all__ = [
    "NOT_THERE",
    "PROBE_TIMEOUT_S",
    "Care",
    "Discover",
    "Discovery",
    "LookUp",
    "Picked",
    "Pool",
    "Prober",
    "Replica",
    "look_after",
    "look_up",
]
