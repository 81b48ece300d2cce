"""Operations on organisations, projects and users."""

from __future__ import annotations

from argosy.gateway.admin.operation import Call, Desk, Operations
from argosy.gateway.admin.shapes import (
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

api = Operations()

ORGANISATIONS = "/admin/organisations"
PROJECTS = "/admin/projects"
USERS = "/admin/users"


@api.add("GET", ORGANISATIONS, "viewer", query=Paging)
def list_organisations(desk: Desk, call: Call) -> Page[OrganisationView]:
    """Organisations, archived ones too, oldest first."""
    return page(desk.accounts.list_organisations(), OrganisationView, call.query)


@api.add("POST", ORGANISATIONS, "admin", body=OrganisationBody)
def create_organisation(desk: Desk, call: Call) -> OrganisationView:
    """Make an organisation."""
    made = desk.accounts.create_organisation(call.body.name, actor=call.actor)
    return view(made, OrganisationView)


@api.add("GET", ORGANISATIONS + "/{id}", "viewer")
def get_organisation(desk: Desk, call: Call) -> OrganisationView:
    """An organisation."""
    return view(desk.accounts.get_organisation(call.id), OrganisationView)


@api.add("PATCH", ORGANISATIONS + "/{id}", "admin", body=OrganisationBody)
def change_organisation(desk: Desk, call: Call) -> OrganisationView:
    """Give an organisation another name."""
    changed = desk.accounts.change_organisation(call.id, name=call.body.name, actor=call.actor)
    return view(changed, OrganisationView)


@api.add("POST", ORGANISATIONS + "/{id}/archive", "admin")
def archive_organisation(desk: Desk, call: Call) -> OrganisationView:
    """End an organisation, with its projects and users."""
    return view(desk.accounts.archive_organisation(call.id, actor=call.actor), OrganisationView)


@api.add("GET", PROJECTS, "viewer", query=OfOrganisation)
def list_projects(desk: Desk, call: Call) -> Page[ProjectView]:
    """Projects, archived ones too, oldest first."""
    return page(desk.accounts.list_projects(call.query.organisation), ProjectView, call.query)


@api.add("POST", PROJECTS, "admin", body=NewProject)
def create_project(desk: Desk, call: Call) -> ProjectView:
    """Make a project."""
    return view(desk.accounts.create_project(**given(call.body), actor=call.actor), ProjectView)


@api.add("GET", PROJECTS + "/{id}", "viewer")
def get_project(desk: Desk, call: Call) -> ProjectView:
    """A project."""
    return view(desk.accounts.get_project(call.id), ProjectView)


@api.add("PATCH", PROJECTS + "/{id}", "admin", body=ProjectChange)
def change_project(desk: Desk, call: Call) -> ProjectView:
    """Change a project; what is left out stays."""
    changed = desk.accounts.change_project(call.id, **given(call.body), actor=call.actor)
    return view(changed, ProjectView)


@api.add("POST", PROJECTS + "/{id}/archive", "admin")
def archive_project(desk: Desk, call: Call) -> ProjectView:
    """End a project: its keys are refused from now on."""
    return view(desk.accounts.archive_project(call.id, actor=call.actor), ProjectView)


@api.add("GET", USERS, "viewer", query=OfOrganisation)
def list_users(desk: Desk, call: Call) -> Page[UserView]:
    """Users, disabled ones too, oldest first."""
    return page(desk.accounts.list_users(call.query.organisation), UserView, call.query)


@api.add("POST", USERS, "admin", body=NewUser)
def create_user(desk: Desk, call: Call) -> UserView:
    """Make a user."""
    return view(desk.accounts.create_user(**given(call.body), actor=call.actor), UserView)


@api.add("GET", USERS + "/{id}", "viewer")
def get_user(desk: Desk, call: Call) -> UserView:
    """A user."""
    return view(desk.accounts.get_user(call.id), UserView)


@api.add("PATCH", USERS + "/{id}", "admin", body=UserChange)
def change_user(desk: Desk, call: Call) -> UserView:
    """Change a user; what is left out stays."""
    changed = desk.accounts.change_user(call.id, **given(call.body), actor=call.actor)
    return view(changed, UserView)


@api.add("POST", USERS + "/{id}/disable", "admin")
def disable_user(desk: Desk, call: Call) -> UserView:
    """End a user: their tokens and keys are refused from now on."""
    return view(desk.accounts.disable_user(call.id, actor=call.actor), UserView)
