"""Creation, hashing and rotation of API keys."""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

import msgspec

from argosy.store.errors import ConflictError
from argosy.store.record_tables import AccountTransaction
from argosy.store.records import Key, Limit, Project, User
from argosy.store.validation import is_key_valid

_ID_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
"""Letters and digits without those that are easily confused."""
_PREFIX_CHARS = 8


def generate_id(prefix: str) -> str:
    """Generate a random id, such as `key_7f3kq2m9x4cd`."""
    return f"{prefix}_{''.join(secrets.choice(_ID_ALPHABET) for _ in range(12))}"


def hash_key(key: str) -> bytes:
    """Compute the SHA-256 digest that is stored. With 256 random bits a key needs neither a salt nor a slow hash."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def create_key(
    transaction: AccountTransaction,
    *,
    project: str,
    user: str | None = None,
    expires_at: float | None = None,
    **fields: Any,  # noqa: ANN401 - other fields of a key
) -> tuple[Key, str]:
    """Create a key. Raises the errors that `Accounts` documents. Returns the stored key and the plain key."""
    transaction.check_same_organisation(
        transaction.get_active_record(Project, project).organisation, User, user
    )
    if expires_at is not None and not expires_at > transaction.now:
        raise ValueError("The key would already have expired. Give an expires_at in the future.")
    draft = Key(
        id="",
        project=project,
        user=user,
        prefix="",
        digest=b"",
        created_at=transaction.now,
        expires_at=expires_at,
        **fields,
    )
    key, plain_key = _issue_key(draft)
    return transaction.create_record(key), plain_key


def rotate_key(transaction: AccountTransaction, old: Key, overlap_s: float) -> tuple[Key, str]:
    """Create a successor with the settings of `old`, which expires after the overlap.

    The limits of `old` move to the successor. Until `old` expires they count the usage of both keys, because a limit
    that restarted with each rotation would be ineffective.

    Returns:
        The successor and its plain key.

    Raises:
        ConflictError: The key is not valid, has already been rotated, or its project is archived.
    """
    if not is_key_valid(old, transaction.now):
        raise ConflictError(f"The key {old.id} is no longer valid. Create a new key.")
    if old.replaced_by is not None:
        raise ConflictError(
            f"The key {old.id} has already been rotated. Rotate {old.replaced_by} instead."
        )
    transaction.get_active_record(Project, old.project)
    lifetime_s = None if old.expires_at is None else old.expires_at - old.created_at
    draft = msgspec.structs.replace(
        old,
        created_at=transaction.now,
        expires_at=None if lifetime_s is None else transaction.now + lifetime_s,
    )
    key, plain_key = _issue_key(draft)
    expires_at = transaction.now + overlap_s
    expires_at = expires_at if old.expires_at is None else min(expires_at, old.expires_at)
    transaction.update_record(old, "rotate", expires_at=expires_at, replaced_by=key.id)
    transaction.create_record(key)
    for limit in transaction.find_records(Limit, owner_kind="key", owner=old.id):
        transaction.update_record(limit, "move", owner=key.id)
    return key, plain_key


def _issue_key(draft: Key) -> tuple[Key, str]:
    """Return the drafted key with a new id and digest, and the plain key, which is not stored."""
    key_id = generate_id("key")
    prefix = f"sk-argosy-{key_id.removeprefix('key_')[:_PREFIX_CHARS]}"
    plain_key = f"{prefix}-{secrets.token_urlsafe(32)}"
    return msgspec.structs.replace(
        draft, id=key_id, prefix=prefix, digest=hash_key(plain_key)
    ), plain_key
