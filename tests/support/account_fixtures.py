"""Account snapshot with two organisations, and connections that present credentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from argosy.store import AccountSnapshot, Key, Organisation, Project, User, hash_key

NOW = 1_800_000_000.0
ACME = Organisation(id="org_acme", name="acme", created_at=0)
ZETA = Organisation(id="org_zeta", name="zeta", created_at=0)
ARCHIVED_ORGANISATION = Organisation(id="org_gone", name="gone", created_at=0, archived_at=1.0)
CHAT = Project(
    id="proj_chat",
    organisation="org_acme",
    name="chat",
    tier="premium",
    weight=2.0,
    flags=("beta",),
    created_at=0,
)
SHARED = Project(
    id="proj_shared", organisation="org_acme", name="shared", share_cache=True, created_at=0
)
ARCHIVED_PROJECT = Project(
    id="proj_old", organisation="org_acme", name="old", created_at=0, archived_at=1.0
)
OFFICE = Project(
    id="proj_office", organisation="org_zeta", name="office", networks=("10.0.0.0/8",), created_at=0
)
OTHER_SHARED = Project(id="proj_shared2", organisation="org_zeta", name="shared", created_at=1.0)
ANN = User(
    id="user_ann",
    organisation="org_acme",
    email="ann@acme.test",
    role="operator",
    project="proj_chat",
    created_at=0,
)
BOB = User(
    id="user_bob", organisation="org_acme", email="bob@acme.test", created_at=0, disabled_at=1.0
)
OTHER_ANN = User(
    id="user_ann2", organisation="org_zeta", email="ann@acme.test", role="admin", created_at=1.0
)
EVE = User(
    id="user_eve",
    organisation="org_zeta",
    email="eve@zeta.test",
    role="admin",
    scope="gateway",
    created_at=0,
)


def plaintext_key(name: str) -> str:
    """Return the plaintext of the key with this name."""
    return f"sk-argosy-{name:0>8}-0123456789abcdef0123456789abcdef"


def make_key(name: str, project: Project = CHAT, **fields: Any) -> Key:  # noqa: ANN401 - fields of a key
    """Return a key of a project."""
    return Key(
        id=f"key_{name}",
        project=project.id,
        name=name,
        prefix=plaintext_key(name)[:18],
        digest=hash_key(plaintext_key(name)),
        created_at=0,
        **fields,
    )


def make_snapshot(*keys: Key) -> AccountSnapshot:
    """Return a snapshot with all organisations, projects and users of this module and these keys."""
    return AccountSnapshot(
        organisations=(ACME, ZETA, ARCHIVED_ORGANISATION),
        projects=(CHAT, SHARED, ARCHIVED_PROJECT, OFFICE, OTHER_SHARED),
        users=(ANN, BOB, EVE, OTHER_ANN),
        keys=keys,
    )


@dataclass(frozen=True)
class FakeConnection:
    """Request headers and peer address, as the authenticator reads them."""

    headers: Mapping[bytes, bytes] = field(default_factory=dict)
    peer_address: str = "127.0.0.1"


def bearer(credential: str, peer_address: str = "127.0.0.1", **headers: str) -> FakeConnection:
    """Return a connection with a bearer credential and other headers, with `_` in place of `-`."""
    other_headers = {
        name.replace("_", "-").encode(): value.encode() for name, value in headers.items()
    }
    authorization = f"Bearer {credential}".encode()
    return FakeConnection({b"authorization": authorization, **other_headers}, peer_address)
