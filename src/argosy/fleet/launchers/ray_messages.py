"""Messages between a `RayLauncher` and the registry of its fleet on a Ray cluster, as JSON.

The driver passes them on without reading them. Unknown fields are ignored, so that a controller can use the registry
that another version has created.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from argosy.fleet.launchers.launcher import LaunchedReplica, LaunchSpec

Method = Literal["list", "wait", "start", "drain", "stop", "remove", "read_log"]


class RayRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Call of a method of the launcher."""

    id: int = 0
    method: Method
    epoch: int = 0
    name: str = ""
    """Name of the replica."""
    spec: LaunchSpec | None = None
    max_bytes: int = 0
    version: int = 0
    """For `wait`: the version that the launcher knows."""


class RayResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a request, or the driver's message that it is connected, which has the id 0."""

    id: int
    error: str = ""
    """Why it failed."""
    is_stale_epoch: bool = False
    """Whether it failed because the epoch is outdated."""
    newer_epoch: int = 0
    """Epoch that the registry has seen, if that is why."""
    version: int = 0
    """Number that changes whenever the state of a replica changes."""
    replicas: Mapping[str, LaunchedReplica] = {}
    log: bytes = b""
