"""API keys: how they are made, what is kept of them, and how one takes the place of another."""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from argosy.store.errors import ConflictError
from argosy.store.record_tables import AccountTransaction
from argosy.store.records import Key, Limit, Project, Role, RoleScope, User
from argosy.store.validation import is_key_valid

_ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Without letters and digits that are taken for one another."""
_PREFIX_CHARS = 8


def generate_id(kind: str) -> str:
    """A new id, such as `key_7f3kq2m9x4cd`."""
    return f"{kind}_{''.join(secrets.choice(_ID_ALPHABET) for _ in range(12))}"


def hash_key(key: str) -> bytes:
    """What is kept of a key: with 256 random bits it needs neither salt nor a slow hash."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def create_key(
    transaction: AccountTransaction,
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
    transaction.check_same_organisation(
        transaction.get_active_record(Project, project).organisation, User, user
    )
    if expires_at is not None and not expires_at > transaction.now:
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
        created_at=transaction.now,
        expires_at=expires_at,
    )
    key, plain = _issue_key(draft)
    return transaction.create_record(key), plain


def rotate_key(transaction: AccountTransaction, old: Key, overlap_s: float) -> tuple[Key, str]:
    """A key like `old` and its plain form; `old` ends when the overlap does. The limits of `old` are the new key's.

    Both are under them until then (see `Limits`): a limit that came back with each rotation would limit nothing.
    """
    if not is_key_valid(old, transaction.now):
        raise ConflictError(f"The key {old.id} works no longer: create a new one.")
    if old.replaced_by is not None:
        raise ConflictError(f"The key {old.id} has been rotated: rotate {old.replaced_by}.")
    transaction.get_active_record(Project, old.project)
    lives_s = None if old.expires_at is None else old.expires_at - old.created_at
    draft = msgspec.structs.replace(
        old,
        created_at=transaction.now,
        expires_at=None if lives_s is None else transaction.now + lives_s,
    )
    key, plain = _issue_key(draft)
    ends = transaction.now + overlap_s
    ends = ends if old.expires_at is None else min(ends, old.expires_at)
    transaction.update_record(old, "rotate", expires_at=ends, replaced_by=key.id)
    transaction.create_record(key)
    for limit in transaction.find_records(Limit, owner_kind="key", owner=old.id):
        transaction.update_record(limit, "move", owner=key.id)
    return key, plain


def _issue_key(draft: Key) -> tuple[Key, str]:
    """The key that `draft` describes with an id of its own, and the plain key, which is kept nowhere."""
    id_ = generate_id("key")
    prefix = f"sk-argosy-{id_.removeprefix('key_')[:_PREFIX_CHARS]}"
    plain = f"{prefix}-{secrets.token_urlsafe(32)}"
    return msgspec.structs.replace(draft, id=id_, prefix=prefix, digest=hash_key(plain)), plain
