"""Signed requests to a gateway from other processes of its store: other gateways, and the controller of the fleet.

Each gateway registers its address and a secret of its own in the store. A request is signed with the secret of the
gateway that it is sent to, so only a reader of the store can send it. A TLS certificate is compared with the one that
the gateway registered. Addresses inside a cluster rarely are names of a certificate.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ssl
import time

from argosy.gateway.upstream import Upstream, UpstreamError, fetch_response
from argosy.http_server import HttpExchange, TlsConfig
from argosy.protocol import ApiError, parse_endpoint
from argosy.store import GatewayRecord

TOKEN_LIFETIME_S = 60.0
"""How long a signed request is valid. The clocks of the processes may differ by as much."""
PEER_TOKEN_HEADER = b"x-argosy-peer-token"


async def send_signed(
    gateway: GatewayRecord,
    tls: TlsConfig | None,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    subject: str,
    timeout_s: float,
) -> tuple[int, bytes]:
    """Send a request to a registered gateway, and return status and body of its answer.

    The signature covers `subject`. Gateways may require the certificate of this process, which is in `tls`.

    Raises:
        UpstreamError: The gateway cannot be reached, registered an invalid address or certificate, or does not answer.
    """
    try:
        upstream = _connect(gateway, tls)
    except (OSError, ValueError) as error:
        raise UpstreamError(str(error), before_response=True) from error
    token = _sign(gateway.secret, int(time.time() + TOKEN_LIFETIME_S), subject)
    headers = [(PEER_TOKEN_HEADER, token)]
    try:
        request = upstream.build_request(method.encode(), path.encode(), body, headers)
        async with asyncio.timeout(timeout_s):
            return await fetch_response(upstream, request)
    except TimeoutError as error:
        message = f"no answer within {timeout_s:g} s"
        raise UpstreamError(message, before_response=True) from error
    finally:
        upstream.close()


def _connect(gateway: GatewayRecord, tls: TlsConfig | None) -> Upstream:
    context = None
    if gateway.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=gateway.certificate)
        if tls is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    return Upstream(parse_endpoint(gateway.url), tls=context)


def check_peer_token(exchange: HttpExchange, secret: str, subject: str) -> None:
    """Check that the sender of a request knows this gateway's secret. To others the path does not exist.

    Raises:
        ApiError: 404 without a valid token.
    """
    token = exchange.get_header(PEER_TOKEN_HEADER)
    expires_at = token.partition(".")[0]
    is_number = expires_at.isascii() and expires_at.isdigit() and len(expires_at) <= 12
    if (
        not is_number
        or not -TOKEN_LIFETIME_S <= int(expires_at) - time.time() <= 2 * TOKEN_LIFETIME_S
        or not hmac.compare_digest(token.encode(), _sign(secret, int(expires_at), subject))
    ):
        raise ApiError(404, "not_found", "The path does not exist. See /openapi.json.")


def _sign(secret: str, expires_at: int, subject: str) -> bytes:
    signature = hmac.new(secret.encode(), f"{expires_at}\n{subject}".encode(), hashlib.sha256)
    return f"{expires_at}.{signature.hexdigest()}".encode()
