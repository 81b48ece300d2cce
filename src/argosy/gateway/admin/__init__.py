"""Admin API under /admin: accounts, keys, limits, prices, usage, the audit log and explanations of requests.

The modules `tenants`, `keys`, `limits_and_prices` and `reports` register their functions as `AdminEndpoint`s. An
endpoint is data: method, path, required role, parameter types and response type. `app` builds an ASGI application from
the endpoints. It authenticates the caller, checks the role, parses parameters and body, and runs the endpoint in a
worker thread. Each endpoint receives an `AdminScope` with the caller's reach: one organisation or the whole gateway.
The other modules bound concurrent calls (`call_limiter`), define the JSON types
(`schemas`) and generate the OpenAPI document (`openapi`).
"""

from argosy.gateway.admin.app import ENDPOINTS, build_admin_app
from argosy.gateway.admin.openapi import add_operations, described_types

__all__ = ["ENDPOINTS", "add_operations", "build_admin_app", "described_types"]
