"""Check of the changes of a caller of the admin API, made in the transaction of the change, on the rows of then."""

from __future__ import annotations

from argosy.gateway.auth import check_grant, check_role
from argosy.gateway.principal import Principal
from argosy.store import (
    AccountRecord,
    AccountTransaction,
    Adapter,
    Flag,
    Key,
    Limit,
    Organisation,
    Price,
    Project,
    Prompt,
    QualityRun,
    QualitySet,
    ReplicaSetting,
    User,
    is_key_valid,
)


def check_change(
    principal: Principal,
    transaction: AccountTransaction,
    before: AccountRecord | None,
    after: AccountRecord | None,
) -> None:
    """Check that the principal may change a record from `before` to `after`. None stands for no record.

    Endpoints check the caller's role. What depends on the record is checked here, since another request may have
    changed the record after an endpoint read it.

    Raises:
        ApiError: 403 if it may not.
    """
    for record in (before, after):
        match record:
            case None:
                pass
            case Organisation() | Price():
                check_role(principal, "admin", "gateway")
            case ReplicaSetting() | Flag():
                check_role(principal, "operator", "gateway")
            case Limit():
                if record.owner_kind == "organisation" or record.unit == "stored_bytes":
                    check_role(principal, "operator", "gateway")
            case Adapter() | Prompt() | QualitySet() | QualityRun():
                check_role(
                    principal, "operator", "organisation" if record.organisation else "gateway"
                )
            case User() | Key():
                check_role(principal, record.role, record.scope)
            case Project():
                pass
            case _:
                raise TypeError(f"there is no rule for changes of {type(record).__name__}")
    if isinstance(after, User) and after.disabled_at is None:
        check_grant(principal, after.role, after.scope)
    if isinstance(after, Key) and is_key_valid(after, transaction.now):
        check_grant(principal, after.role, after.scope, after.models)
    if isinstance(after, Project):
        _check_project(principal, transaction, before, after)
    if isinstance(after, Key) and before is None:
        _check_flags(principal, transaction, after)


def _check_project(
    principal: Principal,
    transaction: AccountTransaction,
    before: AccountRecord | None,
    after: Project,
) -> None:
    """Check a project's share of the gateway, and that the change locks out no key or user with a higher role.

    Archiving the project and changing its networks could.
    """
    old = (
        before
        if isinstance(before, Project)
        else Project(id="", organisation="", name="", created_at=0)
    )
    if (old.tier, old.weight, old.flags) != (after.tier, after.weight, after.flags):
        check_role(principal, "admin", "gateway")
    if before is None:
        return
    for key in transaction.find_records(Key, project=after.id):
        if is_key_valid(key, transaction.now):
            check_role(principal, key.role, key.scope)
    for user in transaction.find_records(User, project=after.id, disabled_at=None):
        check_role(principal, user.role, user.scope)


def _check_flags(principal: Principal, transaction: AccountTransaction, key: Key) -> None:
    """Check that a new key has flags only from an admin of the gateway, or from the key that it replaces."""
    if key.flags:
        replaced = transaction.find_records(Key, replaced_by=key.id)
        if key.flags not in [each.flags for each in replaced]:
            check_role(principal, "admin", "gateway")
