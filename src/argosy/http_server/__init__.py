"""HTTP/1.1 server with size and time limits per connection, TLS, and graceful shutdown.

The `Acceptor` of an `HttpServer` accepts clients on listening sockets and creates one `HttpConnection` per client,
which parses requests with httptools. Each `HttpRequest` gets an `Http1Transport`, which buffers the body, writes the
response, and calls the server's handler in a task. Handlers read the body and write the response through an
`HttpExchange`, which enforces the limits and adds the common headers. A `RouteTable` finds the handler of a path.
`run_handler` converts exceptions of a handler to error responses. A handler may have its response translated to
another dialect of the API by a `ResponseTranslator`.

A handler that accepts a client's handshake gets its `WebSocket`. The response to each message is written through an
exchange of its own over a `MessageTransport`, so the same handlers serve requests and messages.

`check_same_origin` and its companions protect handlers that change state from web pages.
"""

from argosy.http_server.deadlines import Deadlines
from argosy.http_server.error_responses import (
    check_method,
    internal_error,
    run_handler,
)
from argosy.http_server.handover import SocketHandover
from argosy.http_server.http_exchange import (
    JSON_CONTENT_TYPE,
    LARGE_BODY_BYTES,
    ExchangeLimits,
    HttpExchange,
    SlowReaderError,
)
from argosy.http_server.http_request import HttpRequest, RequestHandler
from argosy.http_server.message_transport import MessageTransport
from argosy.http_server.multipart_form import MultipartForm
from argosy.http_server.paced_protocol import PacedProtocol
from argosy.http_server.request_origin import (
    check_json_content_type,
    check_no_page_request,
    check_same_origin,
    is_cross_origin,
)
from argosy.http_server.response_transport import (
    ClientListener,
    DisconnectedError,
    ResponseDialect,
    ResponseTranslator,
    ResponseTransport,
)
from argosy.http_server.routes import ANY_METHOD, Route, RouteMatch, RouteTable
from argosy.http_server.server import (
    SHUTDOWN_GRACE_S,
    HttpServer,
    bind_host,
    bind_tcp,
    bind_unix,
    listen_addresses,
    listen_url,
    listening_sockets,
    tune_gc,
)
from argosy.http_server.tls import CertificateWatcher, TlsConfig
