"""The settings that the admin API shows hold no secrets."""

from __future__ import annotations

import pytest

from argosy.deployment import GatewayConfig
from argosy.gateway.admin.endpoints import AdminRequest, AdminScope, NoParameters
from argosy.gateway.admin.settings import list_settings
from argosy.gateway.principal import ANONYMOUS
from argosy.store import StoreConfig


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:p4ss@db:5432/x", "postgresql://ann:(hidden)@db:5432/x"),
        ("postgresql://ann:p/4:ss@db/x", "postgresql://ann:(hidden)@db/x"),
        (
            "postgresql://db/x?sslpassword=p4ss&user=ann&password=p4ss",
            "postgresql://db/x?sslpassword=(hidden)&user=ann&password=(hidden)",
        ),
        ("sqlite:///argosy.db", "sqlite:///argosy.db"),
    ],
)
def test_passwords_in_urls_are_hidden(url: str, shown: str) -> None:
    async def explain(request_id: str, organisation_id: str | None) -> None:
        """Explain nothing."""

    scope = AdminScope(None, None, explain, config=GatewayConfig(store=StoreConfig(url=url)))
    page = list_settings(scope, AdminRequest(ANONYMOUS, "", NoParameters(), None))
    assert {view.path: view.value for view in page.data}["store.url"] == shown
