"""Registry of the served models and their pools, which follows configuration reloads.

`build_model_entries` validates the configuration and turns each model's replicas into `ReplicaEntry` objects. The
`ModelRegistry` holds one `ModelMembership` per model, with a `PoolMembership` for each version of the model. A
`PoolMembership` adds and removes replicas, starts their probes, KV event subscriptions and DNS discovery, and stops
these tasks for removed replicas. The `ModelRouter` maps the model name of a request to a pool, through aliases, routes
and versions, and checks that the principal may use the model. A reload replaces the models in one step, and removed
models and versions stay open until their running requests have ended. `ReplicaAdmin` applies what operators decide
about replicas.
"""

from argosy.gateway.model_registry.adapter_index import AdapterReplica
from argosy.gateway.model_registry.model_entries import ModelEntries, build_model_entries
from argosy.gateway.model_registry.model_router import CACHE_MISS, ModelRouter, RouteTarget
from argosy.gateway.model_registry.registry import ModelRegistry
from argosy.gateway.model_registry.replica_admin import ReplicaAdmin, ReplicaChange
