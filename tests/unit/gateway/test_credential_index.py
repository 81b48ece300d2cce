"""Whose a token is that names no organisation, where several have the project's name or the email that it says."""

from __future__ import annotations

import msgspec
import pytest

from argosy.gateway.auth.credential_index import CredentialIndex
from argosy.gateway.auth.token_verifier import TokenClaims
from argosy.store import AccountSnapshot, Project, User

EMAIL = "ann@x.test"
SAID = TokenClaims(subject="s", email="", organisation="", project="", role="user", expires_at=0)


def directory(named: dict[str, float], **made: float) -> AccountSnapshot:
    """Each of these organisations has a project `web` and a user, both made then, and `named` so later."""
    projects, users = [], []
    for home in sorted(made, key=made.__getitem__):
        at = made[home]
        projects.append(Project(id=f"p_{home}", organisation=home, name="web", created_at=at))
        users.append(
            User(
                id=f"u_{home}",
                organisation=home,
                email=EMAIL,
                project=f"p_{home}",
                created_at=at,
            )
        )
    times = {f"{kind}_{home}": at for home, at in named.items() for kind in "pu"}
    return AccountSnapshot(projects=tuple(projects), users=tuple(users), renamed_at=times)


def whose(known: AccountSnapshot) -> str:
    """The organisation that both tokens are taken for: one that says the project, and one that says the email."""
    book = CredentialIndex(known)
    by_name, by_email = (
        book.find_by_claims(msgspec.structs.replace(SAID, **said)).principal.organisation
        for said in ({"project": "web"}, {"email": EMAIL})
    )
    assert by_name == by_email
    return by_name


def test_where_nobody_was_renamed_it_is_who_was_made_first() -> None:
    assert whose(directory({}, ours=1, theirs=2)) == "ours"
    assert whose(directory({}, ours=2, theirs=1)) == "theirs"


def test_who_is_older_takes_nobodys_tokens_by_taking_their_name() -> None:
    assert whose(directory({"theirs": 9}, ours=5, theirs=1)) == "ours"


def test_who_took_the_name_before_the_other_was_made_goes_on_having_it() -> None:
    assert whose(directory({"theirs": 3}, ours=5, theirs=1)) == "theirs"


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
def test_of_two_that_were_renamed_it_is_who_was_so_first(ours: float, theirs: float) -> None:
    assert whose(directory({"ours": 7, "theirs": 8}, ours=ours, theirs=theirs)) == "ours"


def test_where_both_came_to_it_at_once_it_is_who_was_made_first() -> None:
    assert whose(directory({"theirs": 5}, ours=5, theirs=1)) == "theirs"


def test_who_has_ended_comes_last_whenever_they_were_named() -> None:
    known = directory({"theirs": 9}, ours=5, theirs=1)
    ours, theirs = known.projects[1], known.projects[0]
    ann, other = known.users[1], known.users[0]
    ended = msgspec.structs.replace(
        known,
        projects=(theirs, msgspec.structs.replace(ours, archived_at=6.0)),
        users=(other, msgspec.structs.replace(ann, disabled_at=6.0)),
    )
    assert whose(ended) == "theirs"
