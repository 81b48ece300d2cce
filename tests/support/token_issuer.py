"""An OpenID Connect issuer on a free port: discovery, keys that can be changed, tokens with real signatures."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
OTHER_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
WEAK_RSA_KEY = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - to be refused
EC_KEY = ec.generate_private_key(ec.SECP256R1())
ED_KEY = ed25519.Ed25519PrivateKey.generate()


def public_jwk(key: PrivateKey, key_id: str, **more: str) -> dict[str, Any]:
    """The public half as a JSON Web Key."""
    public = key.public_key()
    match public:
        case rsa.RSAPublicKey():
            fields = RSAAlgorithm.to_jwk(public, as_dict=True)
        case ec.EllipticCurvePublicKey():
            fields = ECAlgorithm.to_jwk(public, as_dict=True)
        case _:
            fields = OKPAlgorithm.to_jwk(public, as_dict=True)
    return dict(fields) | {"kid": key_id, "use": "sig"} | more


class Issuer:
    """What it publishes can be changed while it runs."""

    def __init__(self) -> None:
        self.keys = [public_jwk(RSA_KEY, "rsa"), public_jwk(EC_KEY, "ec"), public_jwk(ED_KEY, "ed")]
        self.broken = False
        self.named: str | None = None
        """What it calls itself; None: what it is."""
        self.status = 200
        self.drips = False
        """Its keys come a byte at a time, and never to their end."""
        self.asked = 0
        """How often somebody asked for the keys."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def token(
        self,
        key: PrivateKey = RSA_KEY,
        key_id: str = "rsa",
        algorithm: str = "RS256",
        **claims: object,
    ) -> str:
        """A token for the audience `argosy` that lasts a minute; `claims` are added or, when None, left out."""
        usual = {"iss": self.url, "aud": "argosy", "sub": "someone", "exp": time.time() + 60}
        told = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode(told, key, algorithm, headers={"kid": key_id})

    def run(self) -> None:
        """Answer until `stop`."""
        self._server.serve_forever(poll_interval=0.01)

    def stop(self) -> None:
        """Answer no more."""
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
                    while issuer.drips and self.path == "/keys":
                        self.wfile.write(b" ")
                        time.sleep(0.05)
                    self.wfile.write(body or b"")

            def log_message(self, *args: object) -> None:
                """Nobody reads it."""

        return Handler

    def document(self, path: str) -> bytes | None:
        """What is at `path`; None when it cannot be told."""
        if self.broken:
            return None
        if path == "/.well-known/openid-configuration":
            said = {"issuer": self.named or self.url, "jwks_uri": f"{self.url}/keys"}
            return json.dumps(said).encode()
        self.asked += 1
        return json.dumps({"keys": self.keys}).encode()


@contextmanager
def issuer() -> Iterator[Issuer]:
    """One that runs."""
    running = Issuer()
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield running
    finally:
        running.stop()
        thread.join()
