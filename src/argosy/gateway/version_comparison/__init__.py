"""Comparison of the versions of a pool by a gateway, for the gate of a rollout.

An `OutcomeMeter` turns each request that ends into a `RequestOutcome`, keeps recent ones of the stable versions, and
scores those of a running comparison into batches that the controller reads. A `LocalGate` judges them as well, and
rolls a failing version back while no controller is heard. A `RouteWatcher` reads the routes of the pools in the store.
An `AdapterMeter` measures the versions of adapters alike.
"""

from argosy.gateway.version_comparison.adapter_meter import AdapterMeter, publish_versions
from argosy.gateway.version_comparison.local_gate import LocalGate, RouteWatcher
from argosy.gateway.version_comparison.outcome_meter import OutcomeMeter
