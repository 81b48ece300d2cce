"""The replicas of a model: what is known of each, how it is found out, and which one a request gets."""

from argosy.gateway.replicas.care import Care, look_after
from argosy.gateway.replicas.discovery import Discover, Discovery, LookUp, look_up
from argosy.gateway.replicas.pool import Picked, Pool
from argosy.gateway.replicas.probing import NOT_THERE, PROBE_TIMEOUT_S, Prober
from argosy.gateway.replicas.replica import Replica

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
