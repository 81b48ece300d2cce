"""Launchers: one `Launcher` for each environment in which replicas run."""

from argosy.deployment import KubernetesSettings, LaunchResources
from argosy.fleet.launchers.kubernetes import KubernetesLauncher
from argosy.fleet.launchers.launcher import (
    LaunchedReplica,
    Launcher,
    LaunchError,
    LaunchProbes,
    LaunchSpec,
    StaleEpochError,
)
from argosy.fleet.launchers.local import LocalProcessLauncher
from argosy.fleet.launchers.ray import RayLauncher
from argosy.fleet.launchers.simulated import SimulatedLauncher
from argosy.fleet.launchers.simulated_cluster import (
    SimulatedBehaviour,
    SimulatedCluster,
    SimulatedHealth,
    SimulatedNode,
)
from argosy.policy.reconciliation import LaunchState

__all__ = [
    "KubernetesLauncher",
    "KubernetesSettings",
    "LaunchError",
    "LaunchProbes",
    "LaunchResources",
    "LaunchSpec",
    "LaunchState",
    "LaunchedReplica",
    "Launcher",
    "LocalProcessLauncher",
    "RayLauncher",
    "SimulatedBehaviour",
    "SimulatedCluster",
    "SimulatedHealth",
    "SimulatedLauncher",
    "SimulatedNode",
    "StaleEpochError",
]
