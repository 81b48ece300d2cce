"""Replica pools: the replicas of a model with their state and connections.

A `Pool` holds the `ReplicaEndpoint`s of one version of a model. A `ReplicaEndpoint` adds the connections to a
replica to its state: its load, its `ReplicaHealth` and its prefix cache. Both extend the classes of `policy.placement`,
which selects a replica per request. A `Prober` per replica updates the state from health checks and load reports. The
class `DnsDiscovery` adds and removes replicas as the addresses of a DNS name change. All of these coroutines run
in `run_with_restarts`.
"""

from argosy.deployment import DiscoveryMode
from argosy.gateway.pool.dns_discovery import DnsDiscovery, Resolver, resolve_host
from argosy.gateway.pool.placement_requests import build_placement_request, compute_cache_scope
from argosy.gateway.pool.pool import ModelStartup, Pool, PoolVersions
from argosy.gateway.pool.prefix_map import PrefixMap, build_prefix_map
from argosy.gateway.pool.prober import Prober
from argosy.gateway.pool.replica_endpoint import AdminSettings, ReplicaEndpoint
from argosy.gateway.pool.sleep_change import change_sleep
