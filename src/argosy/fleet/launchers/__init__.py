"""Launchers: one `Launcher` for each environment in which replicas run."""

from argosy.deployment import KubernetesSettings, LaunchResources
from argosy.fleet.launchers.kubernetes import KubernetesLauncher
from argosy.fleet.launchers.kubernetes_objects import CONTROLLER_RULES
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
from argosy.policy.reconciliation import LaunchState
