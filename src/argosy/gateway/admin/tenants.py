"""Endpoints for organisations, projects, users and API keys.

Only admins of the whole gateway create, rename and archive organisations, because names are unique across the gateway
and tokens are matched by them. Tiers, weights and flags of projects need the same role. Tiers and weights are relative
to other organisations' projects, and flags select which model answers.

Callers cannot create, rotate or revoke a key with more permissions than their own (see `change_check`).
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy.gateway.admin.endpoints import (
    EXPORT_TIME_LIMIT_S,
    AdminEndpoints,
    AdminRequest,
    AdminScope,
)
from argosy.gateway.admin.schemas import (
    KeyRotation,
    KeyView,
    NewKey,
    NewKeyView,
    NewProject,
    NewUser,
    OrganisationBody,
    OrganisationFilter,
    OrganisationView,
    Page,
    PageQuery,
    ProjectChange,
    ProjectErasure,
    ProjectFilter,
    ProjectView,
    UserChange,
    UserView,
    get_given_fields,
    to_page,
    to_view,
)
from argosy.store import ErasedProject, Key, Project

endpoints = AdminEndpoints()

ORGANISATIONS = "/admin/organisations"
PROJECTS = "/admin/projects"
USERS = "/admin/users"
KEYS = "/admin/keys"


@endpoints.register("GET", ORGANISATIONS, "viewer", query_type=PageQuery)
def list_organisations(scope: AdminScope, request: AdminRequest) -> Page[OrganisationView]:
    """List organisations, including archived ones, oldest first."""
    return to_page(
        scope.accounts.list_organisations(request.query.page_request),
        OrganisationView,
        request.query,
    )


@endpoints.register("POST", ORGANISATIONS, "admin", "gateway", body_type=OrganisationBody)
def create_organisation(scope: AdminScope, request: AdminRequest) -> OrganisationView:
    """Create an organisation."""
    created = scope.accounts.create_organisation(request.body.name, actor=request.actor)
    return to_view(created, OrganisationView)


@endpoints.register("GET", ORGANISATIONS + "/{id}", "viewer")
def get_organisation(scope: AdminScope, request: AdminRequest) -> OrganisationView:
    """Get an organisation."""
    return to_view(scope.accounts.get_organisation(request.resource_id), OrganisationView)


@endpoints.register(
    "PATCH", ORGANISATIONS + "/{id}", "admin", "gateway", body_type=OrganisationBody
)
def change_organisation(scope: AdminScope, request: AdminRequest) -> OrganisationView:
    """Rename an organisation."""
    changed = scope.accounts.change_organisation(
        request.resource_id, name=request.body.name, actor=request.actor
    )
    return to_view(changed, OrganisationView)


@endpoints.register("POST", ORGANISATIONS + "/{id}/archive", "admin", "gateway")
def archive_organisation(scope: AdminScope, request: AdminRequest) -> OrganisationView:
    """Archive an organisation, archive its projects and disable its users."""
    return to_view(
        scope.accounts.archive_organisation(request.resource_id, actor=request.actor),
        OrganisationView,
    )


@endpoints.register("GET", PROJECTS, "viewer", query_type=OrganisationFilter)
def list_projects(scope: AdminScope, request: AdminRequest) -> Page[ProjectView]:
    """List projects, including archived ones, oldest first."""
    query = request.query
    projects = scope.accounts.list_projects(query.organisation, query.page_request)
    return to_page(_view_projects(scope, projects), ProjectView, query)


@endpoints.register("POST", PROJECTS, "admin", body_type=NewProject)
def create_project(scope: AdminScope, request: AdminRequest) -> ProjectView:
    """Create a project. Only an admin of the whole gateway may set a tier, a weight or flags."""
    created = scope.accounts.create_project(**get_given_fields(request.body), actor=request.actor)
    return _view_projects(scope, [created])[0]


@endpoints.register("GET", PROJECTS + "/{id}", "viewer")
def get_project(scope: AdminScope, request: AdminRequest) -> ProjectView:
    """Get a project."""
    return _view_projects(scope, [scope.accounts.get_project(request.resource_id)])[0]


@endpoints.register("PATCH", PROJECTS + "/{id}", "admin", body_type=ProjectChange)
def change_project(scope: AdminScope, request: AdminRequest) -> ProjectView:
    """Change a project. Only an admin of the whole gateway may set a tier, a weight or flags."""
    changed = scope.accounts.change_project(
        request.resource_id, **get_given_fields(request.body), actor=request.actor
    )
    return _view_projects(scope, [changed])[0]


@endpoints.register("POST", PROJECTS + "/{id}/archive", "admin")
def archive_project(scope: AdminScope, request: AdminRequest) -> ProjectView:
    """Archive a project, after which its keys are rejected."""
    archived = scope.accounts.archive_project(request.resource_id, actor=request.actor)
    return _view_projects(scope, [archived])[0]


@endpoints.register(
    "POST",
    PROJECTS + "/{id}/erase",
    "admin",
    body_type=ProjectErasure,
    query_time_limit_s=EXPORT_TIME_LIMIT_S,
)
def erase_project(scope: AdminScope, request: AdminRequest) -> ErasedProject:
    """Archive a project and erase what the store has of it, except sums of the ledger and the audit log."""
    project = scope.accounts.get_project(request.resource_id)
    if request.body.project != project.id:
        raise ValueError(
            "project: repeat the id of the path to confirm that it is erased for ever."
        )
    scope.accounts.archive_project(project.id, actor=request.actor)  # checks whose keys end
    return scope.erasure.erase_project(project, actor=request.actor)


def _view_projects(scope: AdminScope, projects: Sequence[Project]) -> list[ProjectView]:
    """Add to projects what they store, and which of their flags nothing reads."""
    use = scope.stored_bytes.read_use([project.id for project in projects])
    find_unread = scope.replicas.models.find_unread_flags
    return [
        to_view(
            project,
            ProjectView,
            unread_flags=find_unread(project.flags),
            **use[project.id]._asdict(),
        )
        for project in projects
    ]


@endpoints.register("GET", USERS, "viewer", query_type=OrganisationFilter)
def list_users(scope: AdminScope, request: AdminRequest) -> Page[UserView]:
    """List users, including disabled ones, oldest first."""
    query = request.query
    return to_page(
        scope.accounts.list_users(query.organisation, query.page_request), UserView, query
    )


@endpoints.register("POST", USERS, "admin", body_type=NewUser)
def create_user(scope: AdminScope, request: AdminRequest) -> UserView:
    """Create a user, with a role that is not higher than the caller's."""
    return to_view(
        scope.accounts.create_user(**get_given_fields(request.body), actor=request.actor), UserView
    )


@endpoints.register("GET", USERS + "/{id}", "viewer")
def get_user(scope: AdminScope, request: AdminRequest) -> UserView:
    """Get a user."""
    return to_view(scope.accounts.get_user(request.resource_id), UserView)


@endpoints.register("PATCH", USERS + "/{id}", "admin", body_type=UserChange)
def change_user(scope: AdminScope, request: AdminRequest) -> UserView:
    """Change a user whose role, before and after the change, is not higher than the caller's."""
    changed = scope.accounts.change_user(
        request.resource_id, **get_given_fields(request.body), actor=request.actor
    )
    return to_view(changed, UserView)


@endpoints.register("POST", USERS + "/{id}/disable", "admin")
def disable_user(scope: AdminScope, request: AdminRequest) -> UserView:
    """Disable a user, after which their tokens and keys are rejected."""
    return to_view(scope.accounts.disable_user(request.resource_id, actor=request.actor), UserView)


@endpoints.register("GET", KEYS, "viewer", query_type=ProjectFilter)
def list_keys(scope: AdminScope, request: AdminRequest) -> Page[KeyView]:
    """List keys, including revoked ones, oldest first."""
    query = request.query
    keys = scope.accounts.list_keys(query.project, query.page_request)
    return to_page([_view_key(scope, key) for key in keys], KeyView, query)


@endpoints.register("POST", KEYS, "operator", body_type=NewKey)
def create_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Create a key. Only this response contains the plain key."""
    created, plain_key = scope.accounts.create_key(
        **get_given_fields(request.body), actor=request.actor
    )
    return to_view(_view_key(scope, created), NewKeyView, key=plain_key)


@endpoints.register("GET", KEYS + "/{id}", "viewer")
def get_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """Get a key."""
    return _view_key(scope, scope.accounts.get_key(request.resource_id))


@endpoints.register("POST", KEYS + "/{id}/rotate", "operator", body_type=KeyRotation)
def rotate_key(scope: AdminScope, request: AdminRequest) -> NewKeyView:
    """Replace a key, which stays valid for a while. Only this response contains the new plain key."""
    created, plain_key = scope.accounts.rotate_key(
        request.resource_id, request.body.overlap_s, actor=request.actor
    )
    return to_view(_view_key(scope, created), NewKeyView, key=plain_key)


@endpoints.register("POST", KEYS + "/{id}/revoke", "operator")
def revoke_key(scope: AdminScope, request: AdminRequest) -> KeyView:
    """Revoke a key with immediate effect."""
    return _view_key(scope, scope.accounts.revoke_key(request.resource_id, actor=request.actor))


def _view_key(scope: AdminScope, key: Key) -> KeyView:
    """Add to a key which of its flags nothing reads."""
    unread = scope.replicas.models.find_unread_flags(key.flags)
    return to_view(key, KeyView, unread_flags=unread)
