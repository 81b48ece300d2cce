"""`RayLauncher` without a cluster."""

from __future__ import annotations

import pytest

from argosy.fleet.launchers import LaunchError, RayLauncher


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=r"pip install 'argosy\[ray\]'"):
        RayLauncher("argosy-demo")


async def test_unreachable_cluster_is_refused() -> None:
    launcher = RayLauncher("argosy-demo", "127.0.0.1:1")
    with pytest.raises(
        LaunchError, match=r"the Ray cluster 127\.0\.0\.1:1 cannot be used: nothing listens there"
    ):
        await launcher.connect()
    with pytest.raises(LaunchError, match="cannot be used"):
        await launcher.list_replicas()
    await launcher.close()
