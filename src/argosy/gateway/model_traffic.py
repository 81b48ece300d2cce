"""The sender of a request as traffic is divided between models."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Raw

from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import RequestFields
from argosy.policy.traffic import TrafficSubject

SESSION_HEADER = b"x-session-affinity"


def find_subject(
    principal: Principal,
    headers: Mapping[bytes, bytes],
    fields: RequestFields | None,
    request_id: str,
) -> TrafficSubject:
    """Return the sender of a request as traffic is divided: its tenant, and its user, session or request.

    Args:
        principal: Authenticated sender.
        headers: Headers of the request.
        fields: Parsed fields of the request; None if it has no such body.
        request_id: Id of the request, which divides requests that name neither a user nor a session.
    """
    header = headers.get(SESSION_HEADER, b"").decode("latin-1")
    user, session = principal.user, header
    if fields is not None:
        user = _find_user(fields.raw) or user
        session = fields.session_id or header
    return TrafficSubject(
        tenant=principal.tenant,
        user=user,
        session=session,
        request=request_id,
    )


def _find_user(raw: Mapping[str, Raw]) -> str:
    for name in ("safety_identifier", "user"):
        if name in raw:
            value = msgspec.json.decode(raw[name])
            if value and isinstance(value, str):
                return value
    return ""
