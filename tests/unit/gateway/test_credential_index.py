"""A token's organisation, if several have a project or a user with the name or email in its claims."""

from __future__ import annotations

import msgspec
import pytest

from argosy.gateway.auth.credential_index import CredentialIndex, TokenClaims
from argosy.store import AccountSnapshot, Project, User

EMAIL = "ann@x.test"
CLAIMS = TokenClaims(subject="s", email="", organisation="", project="", role="user", expires_at=0)


def make_snapshot(renamed: dict[str, float], **created: float) -> AccountSnapshot:
    """Return organisations created at `created`, each with a project `web` and a user.

    The projects and users of the organisations in `renamed` were renamed at the given times.
    """
    projects, users = [], []
    for organisation in sorted(created, key=created.__getitem__):
        at = created[organisation]
        projects.append(
            Project(id=f"p_{organisation}", organisation=organisation, name="web", created_at=at)
        )
        users.append(
            User(
                id=f"u_{organisation}",
                organisation=organisation,
                email=EMAIL,
                project=f"p_{organisation}",
                created_at=at,
            )
        )
    times = {f"{kind}_{organisation}": at for organisation, at in renamed.items() for kind in "pu"}
    return AccountSnapshot(projects=tuple(projects), users=tuple(users), renamed_at=times)


def resolve_organisation(snapshot: AccountSnapshot) -> str:
    """Return the organisation of a token with the project's name and of one with the email, which must agree."""
    index = CredentialIndex(snapshot)
    by_name, by_email = (
        index.find_by_claims(msgspec.structs.replace(CLAIMS, **claims)).principal.organisation
        for claims in ({"project": "web"}, {"email": EMAIL})
    )
    assert by_name == by_email
    return by_name


@pytest.mark.parametrize(
    ("renamed", "ours", "theirs", "winner"),
    [
        pytest.param({}, 1, 2, "ours", id="first-created"),
        pytest.param({}, 2, 1, "theirs", id="first-created-reversed"),
        pytest.param({"theirs": 9}, 5, 1, "ours", id="renamed-after-other-was-created"),
        pytest.param({"theirs": 3}, 5, 1, "theirs", id="renamed-before-other-was-created"),
        pytest.param({"ours": 7, "theirs": 8}, 1, 2, "ours", id="first-renamed"),
        pytest.param({"ours": 7, "theirs": 8}, 2, 1, "ours", id="first-renamed-created-later"),
        pytest.param({"theirs": 5}, 5, 1, "theirs", id="same-time-first-created"),
    ],
)
def test_first_owner_of_ambiguous_name_wins(
    renamed: dict[str, float], ours: float, theirs: float, winner: str
) -> None:
    """Otherwise an organisation could take another one's tokens with a rename."""
    assert resolve_organisation(make_snapshot(renamed, ours=ours, theirs=theirs)) == winner


def test_archived_owner_comes_last() -> None:
    snapshot = make_snapshot({"theirs": 9}, ours=5, theirs=1)
    ours, theirs = snapshot.projects[1], snapshot.projects[0]
    ann, other = snapshot.users[1], snapshot.users[0]
    ended = msgspec.structs.replace(
        snapshot,
        projects=(theirs, msgspec.structs.replace(ours, archived_at=6.0)),
        users=(other, msgspec.structs.replace(ann, disabled_at=6.0)),
    )
    assert resolve_organisation(ended) == "theirs"
