"""The replicas of a model: what is known of each, how it is found out, and which one a request gets."""

from argosy.gateway.pool.background import CoroutineFactory, run_with_restarts
from argosy.gateway.pool.dns_discovery import DiscoveryMode, DnsDiscovery, Resolver, resolve_host
from argosy.gateway.pool.pool import Pool, RoutingDecision
from argosy.gateway.pool.prober import PROBE_TIMEOUT_S, UNSUPPORTED_STATUSES, Prober
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint

__all__ = [
    "PROBE_TIMEOUT_S",
    "UNSUPPORTED_STATUSES",
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
