"""The console: a web application that shows the fleet, uses it and runs it, served by the gateway on its own port.

`Console` answers the document at `/` and the paths below `/console/`. These are static files, sign-in, the event stream
and the playground. `BrowserGuard` checks the host and the origin of requests. `ConsoleSessions` authenticates by a
session cookie or an API key. It does so for the admin API too, which the application calls like any other client. The
cookie is never accepted for `/v1`.
"""

from argosy.deployment import ConsoleConfig, OidcConfig
from argosy.gateway.console.browser_guard import BrowserGuard
from argosy.gateway.console.console import Console
from argosy.gateway.console.event_stream import ConsoleEvents
from argosy.gateway.console.oidc_sign_in import OidcSignIn
from argosy.gateway.console.sessions import ConsoleSessions
