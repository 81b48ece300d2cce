"""Replica pools: the state of each replica of a model, and the choice of one for each request.

A `Pool` holds the `ReplicaEndpoint`s of one model and selects one per request with a routing policy. Each
`ReplicaEndpoint` combines the connections to a replica with its load, its `ReplicaHealth` and its prefix cache state. A
`Prober` per replica updates this state from health checks and load reports. The class `DnsDiscovery` adds and removes
replicas as the addresses of a DNS name change. All of these background coroutines run in `run_with_restarts`.
"""

from argosy.gateway.pool.admin_settings import AdminSettings
from argosy.gateway.pool.background import CoroutineFactory, run_with_restarts
from argosy.gateway.pool.dns_discovery import DiscoveryMode, DnsDiscovery, Resolver, resolve_host
from argosy.gateway.pool.pool import Pool, RoutingDecision
from argosy.gateway.pool.prober import Prober
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint

__all__ = [
    "AdminSettings",
    "CoroutineFactory",
    "DiscoveryMode",
    "DnsDiscovery",
    "Pool",
    "Prober",
    "ReplicaEndpoint",
    "Resolver",
    "RoutingDecision",
    "resolve_host",
    "run_with_restarts",
]
