"""Check of a request's output constraint before the request is queued."""

from __future__ import annotations

from argosy.gateway.backends import BackendAdapter, BackendKind, translate_constraint
from argosy.gateway.pool import Pool
from argosy.gateway.request_fields import RequestFields
from argosy.protocol import ApiError


def find_unsupporting_replicas(pool: Pool, fields: RequestFields, path: bytes) -> set[str]:
    """Return the names of the pool's replicas that do not enforce the constraint of the request.

    Raises:
        ApiError(400): No replica of the pool enforces it, or it is malformed.
    """
    errors: dict[BackendKind, ApiError | None] = {}
    for replica in pool.replicas.values():
        if replica.kind not in errors:
            errors[replica.kind] = _find_error(fields, path, replica.adapter)
    supported = [kind for kind, error in errors.items() if error is None]
    if errors and not supported:
        raise next(error for error in errors.values() if error is not None)
    return {name for name, replica in pool.replicas.items() if replica.kind not in supported}


def _find_error(fields: RequestFields, path: bytes, adapter: BackendAdapter) -> ApiError | None:
    try:
        translate_constraint(fields.raw, path, adapter)
    except ApiError as error:
        return error
    return None
