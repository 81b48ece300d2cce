"""The declaration of a fleet: what a fleet file says, and what follows from it.

The function `load_fleet` reads a file and its overlays into a `FleetConfig`, which `validate_fleet` checks. With
`dump_fleet` it becomes the canonical text that the store keeps, and `parse_fleet` reads that again. The gateway's admin
API reads changes with `parse_remote_change`, which refuses some. An `EngineKind`
describes how the replicas of a pool are started. From these, `build_launch_spec` builds the specification for a
launcher. The digest of `replica_digest` shows whether running replicas must be replaced, and `compare_fleets` plans all
changes between two declarations. The settings of `build_gateway_config` omit what only the controller needs.
"""

from argosy.fleet.declaration.argosy_options import ArgosyOptions
from argosy.fleet.declaration.comparison import (
    ChangeAction,
    ChangeEffect,
    PlannedChange,
    compare_fleets,
)
from argosy.fleet.declaration.config import (
    AutoscalingConfig,
    ControllerConfig,
    FleetConfig,
    FleetModelConfig,
    ObjectivesConfig,
    PoolConfig,
    RayConfig,
    SecretReference,
)
from argosy.fleet.declaration.documents import dump_fleet
from argosy.fleet.declaration.engine_catalog import BUILT_IN_ENGINES, find_engine
from argosy.fleet.declaration.engine_kind import EngineKind
from argosy.fleet.declaration.gateway_settings import build_gateway_config
from argosy.fleet.declaration.launch_spec import build_launch_spec, replica_digest
from argosy.fleet.declaration.loading import (
    load_fleet,
    locate_fleet,
    parse_fleet,
    parse_remote_change,
)
from argosy.fleet.declaration.pinned_prompt import ExpectedText, PinnedMessage, PinnedPrompt
from argosy.fleet.declaration.rollout_config import RolloutConfig
from argosy.fleet.declaration.validation import GATEWAY_POOL, validate_fleet

__all__ = [
    "BUILT_IN_ENGINES",
    "GATEWAY_POOL",
    "ArgosyOptions",
    "AutoscalingConfig",
    "ChangeAction",
    "ChangeEffect",
    "ControllerConfig",
    "EngineKind",
    "ExpectedText",
    "FleetConfig",
    "FleetModelConfig",
    "ObjectivesConfig",
    "PinnedMessage",
    "PinnedPrompt",
    "PlannedChange",
    "PoolConfig",
    "RayConfig",
    "RolloutConfig",
    "SecretReference",
    "build_gateway_config",
    "build_launch_spec",
    "compare_fleets",
    "dump_fleet",
    "find_engine",
    "load_fleet",
    "locate_fleet",
    "parse_fleet",
    "parse_remote_change",
    "replica_digest",
    "validate_fleet",
]
