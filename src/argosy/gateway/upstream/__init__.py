"""HTTP/1.1 client for the servers behind the gateway.

An `Upstream` holds the connections to one replica and keeps idle ones for the next request. It resolves the replica's
name, tries the addresses in turn, and connects with TLS where an `UpstreamTls` asks for it. An `UpstreamConnection`
parses responses and calls a `ResponseListener`. The usual listener is an `UpstreamResponse`, which sends one request
and lets a coroutine await the status and the body. `fetch_path` and `fetch_response` do all of this for short requests.
"""

from argosy.deployment import UpstreamTls
from argosy.gateway.upstream.connection import UpstreamError
from argosy.gateway.upstream.upstream import (
    Upstream,
    create_client_ssl_context,
    encode_headers,
    resolve_addresses,
)
from argosy.gateway.upstream.upstream_response import (
    ResponseTooLargeError,
    StreamPausedError,
    UpstreamResponse,
    fetch_path,
    fetch_response,
)
