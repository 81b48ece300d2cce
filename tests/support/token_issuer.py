"""OpenID Connect issuer on a free port, and authenticators that trust its tokens.

Never compared with a real issuer.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from argosy.deployment import AuthConfig, JwtConfig
from argosy.gateway.auth import Authenticator, ConnectionInfo
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from tests.support.account_fixtures import bearer, make_key, make_snapshot

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
WEAK_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - must be rejected
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()
FETCH_TIMEOUT_S = 20.0


def public_jwk(key: PrivateKey, key_id: str, **fields: str) -> dict[str, Any]:
    """Return the public key as a JSON Web Key with additional fields."""
    public = key.public_key()
    match public:
        case rsa.RSAPublicKey():
            jwk = RSAAlgorithm.to_jwk(public, as_dict=True)
        case ec.EllipticCurvePublicKey():
            jwk = ECAlgorithm.to_jwk(public, as_dict=True)
        case _:
            jwk = OKPAlgorithm.to_jwk(public, as_dict=True)
    return dict(jwk) | {"kid": key_id, "use": "sig"} | fields


class TokenIssuer:
    """Issuer that publishes discovery and keys over HTTP. Attributes may be changed while it runs."""

    def __init__(self) -> None:
        self.keys = [public_jwk(RSA_KEY, "rsa"), public_jwk(EC_KEY, "ec"), public_jwk(ED_KEY, "ed")]
        self.is_broken = False
        """Whether every request gets status 500."""
        self.published_issuer: str | None = None
        """Issuer in the discovery document, by default the URL."""
        self.status = 200
        self.keys_never_end = False
        """Whether the keys are sent byte by byte without an end."""
        self.num_key_requests = 0
        self.code_challenge = ""
        """Challenge of the sign-in that waits for its code."""
        self.id_token = ""
        """Token that the issuer returns for the code `good`."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def token(
        self,
        key: PrivateKey = RSA_KEY,
        key_id: str = "rsa",
        algorithm: str = "RS256",
        **claims: object,
    ) -> str:
        """Return a token for the audience `argosy` that expires in a minute.

        `claims` are added, or omitted if None.
        """
        defaults = {"iss": self.url, "aud": "argosy", "sub": "someone", "exp": time.time() + 60}
        if "email" in claims:
            defaults["email_verified"] = True
        all_claims = defaults | claims
        present = {name: value for name, value in all_claims.items() if value is not None}
        return jwt.encode(present, key, algorithm, headers={"kid": key_id})

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = issuer.document(self.path)
                self.send_response(500 if body is None else issuer.status)
                self.send_header("content-type", "application/json")
                self.end_headers()
                with contextlib.suppress(OSError):
                    while issuer.keys_never_end and self.path == "/keys":
                        self.wfile.write(b" ")
                        time.sleep(0.05)
                    self.wfile.write(body or b"")

            def do_POST(self) -> None:
                form = self.rfile.read(int(self.headers["content-length"])).decode()
                body = issuer.exchange_code(dict(parse_qsl(form)))
                self.send_response(400 if body is None else 200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                self.wfile.write(body or b"{}")

            def log_message(self, *args: object) -> None:
                """Log no requests."""

        return Handler

    def document(self, path: str) -> bytes | None:
        """Return the document at `path`, or None if the issuer is broken."""
        if self.is_broken:
            return None
        if path == "/.well-known/openid-configuration":
            metadata = {"issuer": self.published_issuer or self.url, "jwks_uri": f"{self.url}/keys"}
            metadata["authorization_endpoint"] = f"{self.url}/authorize"
            metadata["token_endpoint"] = f"{self.url}/token"
            return json.dumps(metadata).encode()
        self.num_key_requests += 1
        return json.dumps({"keys": self.keys}).encode()

    def exchange_code(self, form: dict[str, str]) -> bytes | None:
        """Return the answer of the token endpoint, or None if the code or its verifier is wrong."""
        digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        if form.get("code") != "good" or challenge != self.code_challenge:
            return None
        return json.dumps({"id_token": self.id_token, "token_type": "Bearer"}).encode()


@contextmanager
def run_issuer() -> Iterator[TokenIssuer]:
    """Run an issuer."""
    issuer = TokenIssuer()
    thread = threading.Thread(target=issuer.run)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.stop()
        thread.join()


class OffsetClock:
    """System time plus an offset that a test sets."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.offset_s


def make_jwt_authenticator(
    issuer: TokenIssuer,
    clock: OffsetClock | None = None,
    steady_clock: OffsetClock | None = None,
    **settings: Any,  # noqa: ANN401 - fields of `JwtConfig`
) -> Authenticator:
    """Return an authenticator that accepts API key "a" and tokens of an issuer."""
    defaults: dict[str, Any] = {"issuer": issuer.url, "audience": ("argosy",)}
    config = AuthConfig(jwt=JwtConfig(**defaults | settings))
    clock = clock or OffsetClock()
    return Authenticator(
        make_snapshot(make_key("a")), config, clock, steady_clock=steady_clock or clock
    )


def authenticate(authenticator: Authenticator, connection: ConnectionInfo) -> Principal:
    """Authenticate again while signing keys are being fetched, as a client does."""
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    while True:
        try:
            return authenticator.authenticate(connection)
        except ApiError as error:
            if error.retry_after_s != 1.0 or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def token_rejection(authenticator: Authenticator, token: str) -> tuple[int, str]:
    """Return status and message of the error for a token, once the signing keys are fetched."""
    with pytest.raises(ApiError) as caught:
        authenticate(authenticator, bearer(token))
    return caught.value.status, caught.value.message


def wait_for_rejection(authenticator: Authenticator, token: str) -> tuple[int, str]:
    """Wait until a token is rejected. Returns status and message."""
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            authenticate(authenticator, bearer(token))
        except ApiError as error:
            return error.status, error.message
        time.sleep(0.01)
    raise AssertionError("the token is still accepted")
