"""Signed requests to a gateway from other processes of its store: other gateways, and the controller of the fleet.

Each gateway registers its address and a secret of its own in the store. A request is signed with the secret of the
gateway that it is sent to, so only a reader of the store can send it. A TLS certificate is compared with the one that
the gateway registered. Addresses inside a cluster rarely are names of a certificate.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
import time

from argosy.gateway.upstream import Upstream
from argosy.http_server import HttpExchange, TlsConfig
from argosy.protocol import ApiError, parse_endpoint
from argosy.store import GatewayRecord

TOKEN_LIFETIME_S = 60.0
"""How long a signed request is valid. The clocks of the processes may differ by as much."""
PEER_TOKEN_HEADER = b"x-argosy-peer-token"


def connect_gateway(gateway: GatewayRecord, tls: TlsConfig | None) -> Upstream:
    """Return connections to a registered gateway. The caller closes them.

    Args:
        gateway: Record of the gateway.
        tls: Certificate of this process, since gateways may require client certificates.

    Raises:
        OSError: The certificate of this process cannot be read.
        ValueError: The gateway registered an invalid address or certificate.
    """
    context = None
    if gateway.certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=gateway.certificate)
        if tls is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    return Upstream(parse_endpoint(gateway.url), tls=context)


def sign_peer_token(secret: str, subject: str) -> bytes:
    """Return the value of `PEER_TOKEN_HEADER` for one request: the time until which it is valid, and a signature.

    Args:
        secret: Secret of the gateway that the request is sent to.
        subject: Everything of the request that must not be changed.
    """
    return _sign(secret, int(time.time() + TOKEN_LIFETIME_S), subject)


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
