"""A user without a home folder, as in a container that runs under an arbitrary user id."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest


def remove_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make the user unknown to the system, without the variables that name folders, and change into `folder`."""

    def unknown(_: int) -> pwd.struct_passwd:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(folder)
