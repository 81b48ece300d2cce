"""What `argosy serve` finds out of its store before it says how to talk to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.cli.auth_bootstrap import AuthBootstrap, AuthModeName, AuthSetup
from argosy.cli.startup_display import StartupDisplay
from argosy.store import open_store

LOCAL, ANYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - nothing listens


@pytest.mark.parametrize(
    ("auth", "host", "before", "after"),
    [
        ("auto", LOCAL, False, True),
        ("auto", ANYWHERE, True, True),
        ("keys", LOCAL, True, True),
        ("off", LOCAL, False, False),
        ("off", ANYWHERE, False, False),
    ],
)
def test_callers_need_keys_once_there_are_some(
    tmp_path: Path, auth: AuthModeName, host: str, *, before: bool, after: bool
) -> None:
    url = f"sqlite:///{tmp_path}/argosy.db"
    door = AuthBootstrap(url, auth, host)
    opening = door.prepare_store()
    assert (opening.key_required, opening.first_key is not None) == (before, before)
    _make_key(url)
    assert door.prepare_store() == AuthSetup(None, after)


def _make_key(url: str) -> None:
    store = open_store(url)
    made = store.accounts.create_organisation("acme", actor="test")
    project = store.accounts.create_project(made.id, "web", actor="test")
    store.accounts.create_key(project.id, "first", actor="test")
    store.close()


@pytest.mark.parametrize(("keyed", "said"), [(True, "ARGOSY_API_KEY"), (False, '"none"')])
def test_the_panel_says_whether_it_takes_a_key(
    capsys: pytest.CaptureFixture[str], *, keyed: bool, said: str
) -> None:
    StartupDisplay().show_ready("http://127.0.0.1:8000", "m", key_required=keyed)
    assert said in capsys.readouterr().err
