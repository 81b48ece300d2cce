"""API keys: how they are made, what is kept of them, and how one takes the place of another."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from argosy.store.errors import ConflictError
from argosy.store.record_tables import Change
from argosy.store.records import Key, Limit, Project, Role, RoleScope, User
from argosy.store.validation import working

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without letters and digits that are taken for one another."""
_SHOWN = 8


def new_id(kind: str) -> str:
    """A new id, such as `key_7f3kq2m9x4cd`."""
    return f"{kind}_{''.join(secrets.choice(_ALPHABET) for _ in range(12))}"


def digest(key: str) -> bytes:
    """What is kept of a key: with 256 random bits it needs neither salt nor a slow hash."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def create_key(
    change: Change,
    *,
    project: str,
    name: str,
    user: str | None = None,
    role: Role = "caller",
    scope: RoleScope = "organisation",
    models: tuple[str, ...] = (),
    networks: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    expires_at: float | None = None,
) -> tuple[Key, str]:
    """A new key and its plain form. Raises as `Accounts` does."""
    change.check_organisation(change.get_living(Project, project).organisation, User, user)
    if expires_at is not None and not expires_at > change.now:
        raise ValueError("A key expires in the future: give a later expires_at.")
    draft = Key(
        id="",
        project=project,
        user=user,
        name=name,
        prefix="",
        digest=b"",
        role=role,
        scope=scope,
        models=models,
        networks=networks,
        flags=flags,
        created_at=change.now,
        expires_at=expires_at,
    )
    key, plain = _issue(draft)
    return change.create(key), plain


def rotate_key(change: Change, old: Key, overlap_s: float) -> tuple[Key, str]:
    """A key like `old` and its plain form; `old` ends when the overlap does. The limits of `old` are the new key's.

    Both are under them until then (see `Limits`): a limit that came back with each rotation would limit nothing.
    """
    if not working(old, change.now):
        raise ConflictError(f"The key {old.id} works no longer: create a new one.")
    if old.replaced_by is not None:
        raise ConflictError(f"The key {old.id} has been rotated: rotate {old.replaced_by}.")
    change.get_living(Project, old.project)
    lives_s = None if old.expires_at is None else old.expires_at - old.created_at
    draft = msgspec.structs.replace(
        old, created_at=change.now, expires_at=None if lives_s is None else change.now + lives_s
    )
    key, plain = _issue(draft)
    ends = change.now + overlap_s
    ends = ends if old.expires_at is None else min(ends, old.expires_at)
    change.change(old, "rotate", expires_at=ends, replaced_by=key.id)
    change.create(key)
    for limit in change.find(Limit, owner_kind="key", owner=old.id):
        change.change(limit, "move", owner=key.id)
    return key, plain


def _issue(draft: Key) -> tuple[Key, str]:
    """The key that `draft` describes with an id of its own, and the plain key, which is kept nowhere."""
    id_ = new_id("key")
    prefix = f"sk-argosy-{id_.removeprefix('key_')[:_SHOWN]}"
    plain = f"{prefix}-{secrets.token_urlsafe(32)}"
    return msgspec.structs.replace(draft, id=id_, prefix=prefix, digest=digest(plain)), plain
