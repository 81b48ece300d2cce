"""`RayLauncher` without Ray."""

from __future__ import annotations

import pytest

from argosy.fleet.launchers import LaunchError, RayLauncher


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(LaunchError, match=r"pip install 'argosy\[ray\]'"):
        RayLauncher("argosy-demo")
