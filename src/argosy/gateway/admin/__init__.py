"""Admin API under /admin: accounts, keys, limits, prices, usage, the audit log and explanations of requests.

The modules `tenants`, `limits_and_prices` and others register their functions as `AdminEndpoint`s. An endpoint
is data: method, path, required role, parameter types and response type.

`routes` makes a route of each. Its handler parses parameters and body and runs the endpoint in a worker thread. Each
endpoint receives an `AdminScope` with the caller's reach: one organisation or the whole gateway. The other modules
bound concurrent calls (`call_limiter`) and define the JSON types (`schemas`).
"""

from argosy.gateway.admin.call_limiter import AdminCallLimiter
from argosy.gateway.admin.endpoints import AdminRequest, AdminScope
from argosy.gateway.admin.routes import build_admin_routes, list_endpoints
