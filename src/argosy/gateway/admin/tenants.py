"""Operations on organisations, projects and users.

Organisations are made, named and ended by those who run the whole gateway: a name is taken for all, and tokens are
matched by it. Tiers and weights are given by them too, since they weigh against other organisations' projects; and
flags, which decide what model answers.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET

from argosy.gateway.admin.endpoints import Call, Desk, Operations
from argosy.gateway.admin.schemas import (
    NewProject,
    NewUser,
    OfOrganisation,
    OrganisationBody,
    OrganisationView,
    Page,
    Paging,
    ProjectChange,
    ProjectView,
    UserChange,
    UserView,
    given,
    page,
    view,
)
from argosy.gateway.auth import check_grant, check_role
from argosy.gateway.principal import Caller
from argosy.store import working

api = Operations()

ORGANISATIONS = "/admin/organisations"
PROJECTS = "/admin/projects"
USERS = "/admin/users"


@api.add("GET", ORGANISATIONS, "viewer", query=Paging)
def list_organisations(desk: Desk, call: Call) -> Page[OrganisationView]:
    """Organisations, archived ones too, oldest first."""
    return page(desk.accounts.list_organisations(call.query.part), OrganisationView, call.query)


@api.add("POST", ORGANISATIONS, "admin", "gateway", body=OrganisationBody)
def create_organisation(desk: Desk, call: Call) -> OrganisationView:
    """Make an organisation."""
    made = desk.accounts.create_organisation(call.body.name, actor=call.actor)
    return view(made, OrganisationView)


@api.add("GET", ORGANISATIONS + "/{id}", "viewer")
def get_organisation(desk: Desk, call: Call) -> OrganisationView:
    """An organisation."""
    return view(desk.accounts.get_organisation(call.id), OrganisationView)


@api.add("PATCH", ORGANISATIONS + "/{id}", "admin", "gateway", body=OrganisationBody)
def change_organisation(desk: Desk, call: Call) -> OrganisationView:
    """Give an organisation another name."""
    changed = desk.accounts.change_organisation(call.id, name=call.body.name, actor=call.actor)
    return view(changed, OrganisationView)


@api.add("POST", ORGANISATIONS + "/{id}/archive", "admin", "gateway")
def archive_organisation(desk: Desk, call: Call) -> OrganisationView:
    """End an organisation, with its projects and users."""
    return view(desk.accounts.archive_organisation(call.id, actor=call.actor), OrganisationView)


@api.add("GET", PROJECTS, "viewer", query=OfOrganisation)
def list_projects(desk: Desk, call: Call) -> Page[ProjectView]:
    """Projects, archived ones too, oldest first."""
    query = call.query
    return page(desk.accounts.list_projects(query.organisation, query.part), ProjectView, query)


@api.add("POST", PROJECTS, "admin", body=NewProject)
def create_project(desk: Desk, call: Call) -> ProjectView:
    """Make a project. To give a tier, a weight or flags takes an admin of the whole gateway."""
    _check_share(call.caller, call.body)
    return view(desk.accounts.create_project(**given(call.body), actor=call.actor), ProjectView)


@api.add("GET", PROJECTS + "/{id}", "viewer")
def get_project(desk: Desk, call: Call) -> ProjectView:
    """A project."""
    return view(desk.accounts.get_project(call.id), ProjectView)


@api.add("PATCH", PROJECTS + "/{id}", "admin", body=ProjectChange)
def change_project(desk: Desk, call: Call) -> ProjectView:
    """Change a project; what is left out stays. Tier, weight and flags take an admin of the whole gateway."""
    _check_share(call.caller, call.body)
    _check_holders(desk, call)
    changed = desk.accounts.change_project(call.id, **given(call.body), actor=call.actor)
    return view(changed, ProjectView)


@api.add("POST", PROJECTS + "/{id}/archive", "admin")
def archive_project(desk: Desk, call: Call) -> ProjectView:
    """End a project: its keys are refused from now on."""
    _check_holders(desk, call)
    return view(desk.accounts.archive_project(call.id, actor=call.actor), ProjectView)


@api.add("GET", USERS, "viewer", query=OfOrganisation)
def list_users(desk: Desk, call: Call) -> Page[UserView]:
    """Users, disabled ones too, oldest first."""
    query = call.query
    return page(desk.accounts.list_users(query.organisation, query.part), UserView, query)


@api.add("POST", USERS, "admin", body=NewUser)
def create_user(desk: Desk, call: Call) -> UserView:
    """Make a user. Nobody can make one who may do more than they may themselves."""
    check_grant(call.caller, call.body.role, call.body.scope)
    return view(desk.accounts.create_user(**given(call.body), actor=call.actor), UserView)


@api.add("GET", USERS + "/{id}", "viewer")
def get_user(desk: Desk, call: Call) -> UserView:
    """A user."""
    return view(desk.accounts.get_user(call.id), UserView)


@api.add("PATCH", USERS + "/{id}", "admin", body=UserChange)
def change_user(desk: Desk, call: Call) -> UserView:
    """Change a user; what is left out stays. Nobody can change one who may do more, or let one do more."""
    before = desk.accounts.get_user(call.id)
    after = msgspec.structs.replace(before, **given(call.body))
    for user in (before, after):
        check_grant(call.caller, user.role, user.scope)
    changed = desk.accounts.change_user(call.id, **given(call.body), actor=call.actor)
    return view(changed, UserView)


@api.add("POST", USERS + "/{id}/disable", "admin")
def disable_user(desk: Desk, call: Call) -> UserView:
    """End a user: their tokens and keys are refused from now on."""
    user = desk.accounts.get_user(call.id)
    check_role(call.caller, user.role, user.scope)
    return view(desk.accounts.disable_user(call.id, actor=call.actor), UserView)


def _check_share(caller: Caller, body: NewProject | ProjectChange) -> None:
    if not (body.tier is body.weight is body.flags is UNSET):
        check_role(caller, "admin", "gateway")


def _check_holders(desk: Desk, call: Call) -> None:
    """Raise ApiError 403 when a key or a user of the project may do more than the caller.

    The caller could end it, or fence it in.
    """
    now = time.time()
    for key in desk.accounts.list_keys(call.id):
        if working(key, now):
            check_role(call.caller, key.role, key.scope)
    for user in desk.accounts.list_users():
        if user.project == call.id and user.disabled_at is None:
            check_role(call.caller, user.role, user.scope)
