"""Sign-in with an OpenID Connect issuer: the authorization code flow with PKCE (RFC 6749, RFC 7636)."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import os
import secrets
import time
from urllib.parse import parse_qs, urlencode

import msgspec
import structlog

from argosy.deployment import OidcConfig
from argosy.gateway.auth import Authenticator
from argosy.gateway.console.sessions import ConsoleSessions, read_cookie
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError
from argosy.proxies import direct_mounts

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

FLOW_COOKIE = "__Host-argosy-oidc"
"""Cookie of a flow that has begun. It is Lax, since the issuer's page sends the browser back."""
FLOW_LIFETIME_S = 600
TOKEN_TIMEOUT_S = 10.0
ENDPOINTS_REFRESH_S = 300.0
"""How long the issuer's endpoints are used before they are read again. Anyone may begin a flow."""
MAX_ANSWER_BYTES = 1 << 20


class _TokenAnswer(msgspec.Struct):
    id_token: str


class OidcSignIn:
    """The two routes of the flow. `start` leads to the issuer, which leads back to `finish`.

    Args:
        config: Settings of the flow.
        issuer: URL of the issuer, whose tokens the authenticator trusts.
        authenticator: Verifies the issuer's tokens.
        sessions: Opens the session.
    """

    def __init__(
        self,
        config: OidcConfig,
        issuer: str,
        authenticator: Authenticator,
        sessions: ConsoleSessions,
    ) -> None:
        """Raise ValueError if the environment variable of the client's secret is not set."""
        variable = config.client_secret_env
        if variable is not None and variable not in os.environ:
            raise ValueError(
                f"console.oidc: the environment variable {variable} is not set. Set it to the secret."
            )
        self._config = config
        self._issuer = issuer
        self._authenticator = authenticator
        self._sessions = sessions
        self._endpoints = ("", "")
        self._endpoints_expire_at = -math.inf
        self._discovery = asyncio.Lock()

    async def start(self, exchange: HttpExchange) -> None:
        """Send the browser to the issuer, with a new state, nonce and code verifier in a cookie.

        Raises:
            ApiError: 503 if the issuer cannot be reached.
        """
        endpoint, _ = await self._discover()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        digest = hashlib.sha256(verifier.encode()).digest()
        parameters = {
            "response_type": "code",
            "client_id": self._config.client_id,
            "redirect_uri": self._config.redirect_uri,
            "scope": " ".join(self._config.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        _set_flow_cookie(exchange, f"{state}.{nonce}.{verifier}", FLOW_LIFETIME_S)
        separator = "&" if "?" in endpoint else "?"
        await _redirect(exchange, f"{endpoint}{separator}{urlencode(parameters)}")

    async def finish(self, exchange: HttpExchange) -> None:
        """Open a session by the issuer's answer, and send the browser to the console, which shows an error's code."""
        try:
            await self._open_session(exchange)
        except ApiError as error:
            log.warning("oidc_sign_in_failed", error=error.code, reason=error.message)
            await _redirect(exchange, f"../../#/overview?sign_in_error={error.code}")
        else:
            await _redirect(exchange, "../../")

    async def _open_session(self, exchange: HttpExchange) -> None:
        """Exchange the issuer's code for a token, and open a session for its bearer.

        Raises:
            ApiError: 401 if the answer does not belong to a flow of this browser, or its token is not accepted. 503 if
                the issuer cannot be reached.
        """
        parameters = {
            name: values[0] for name, values in parse_qs(exchange.query.decode("latin-1")).items()
        }
        state, _, rest = read_cookie(exchange, FLOW_COOKIE).partition(".")
        nonce, _, verifier = rest.partition(".")
        _set_flow_cookie(exchange, "", 0)
        if not state or not hmac.compare_digest(
            state.encode(), parameters.get("state", "").encode()
        ):
            raise _refuse("The sign-in took too long, or began in another browser.")
        if parameters.get("iss", self._issuer) != self._issuer:
            raise _refuse("The answer is from another issuer.")
        if "code" not in parameters:
            raise _refuse(f"The issuer refused: {parameters.get('error', 'no code')[:100]}.")
        token = await self._exchange_code(parameters["code"], verifier)
        claims = self._authenticator.verify_id_token(token, exchange, nonce)
        await self._sessions.open_for_claims(exchange, claims)

    async def _discover(self) -> tuple[str, str]:
        """Return the issuer's endpoints for authorization and for tokens."""
        async with self._discovery:
            if time.monotonic() >= self._endpoints_expire_at:
                self._endpoints = await self._read_endpoints()
                self._endpoints_expire_at = time.monotonic() + ENDPOINTS_REFRESH_S
            return self._endpoints

    async def _read_endpoints(self) -> tuple[str, str]:
        from argosy.gateway.auth.signing_keys import discover_provider  # PyJWT takes long to import

        try:
            provider = await run_in_daemon_thread(discover_provider, self._issuer)
        except ValueError as error:
            raise _issuer_unavailable(str(error)) from error
        if not (provider.authorization_endpoint and provider.token_endpoint):
            raise _issuer_unavailable(f"{self._issuer} publishes no endpoints for sign-in")
        return provider.authorization_endpoint, provider.token_endpoint

    async def _exchange_code(self, code: str, verifier: str) -> str:
        """Return the id token for a code."""
        _, endpoint = await self._discover()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._config.redirect_uri,
            "client_id": self._config.client_id,
            "code_verifier": verifier,
        }
        if self._config.client_secret_env is not None:
            form["client_secret"] = os.environ.get(self._config.client_secret_env, "")
        import httpx2  # takes long to import

        try:
            async with httpx2.AsyncClient(
                timeout=TOKEN_TIMEOUT_S, mounts=direct_mounts(endpoint)
            ) as client:
                answer = await client.post(
                    endpoint, data=form, headers={"accept": "application/json"}
                )
        except (OSError, httpx2.HTTPError) as error:
            raise _issuer_unavailable(str(error)) from error
        if answer.status_code != 200 or len(answer.content) > MAX_ANSWER_BYTES:
            raise _refuse(f"The issuer did not accept the code (status {answer.status_code}).")
        try:
            return msgspec.json.decode(answer.content, type=_TokenAnswer).id_token
        except msgspec.DecodeError as error:
            raise _refuse("The issuer's answer has no id token.") from error


async def _redirect(exchange: HttpExchange, location: str) -> None:
    exchange.extra_headers += [(b"location", location.encode()), (b"cache-control", b"no-store")]
    await exchange.send_response(302, b"", b"text/plain")


def _set_flow_cookie(exchange: HttpExchange, value: str, max_age_s: int) -> None:
    attributes = f"Path=/; HttpOnly; Secure; SameSite=Lax; Max-Age={max_age_s}"
    exchange.extra_headers.append((b"set-cookie", f"{FLOW_COOKIE}={value}; {attributes}".encode()))


def _refuse(reason: str) -> ApiError:
    return ApiError(401, "sign_in_failed", f"{reason} Open the console and sign in again.")


def _issuer_unavailable(reason: str) -> ApiError:
    log.warning("oidc_issuer_unavailable", reason=reason)
    message = "The issuer cannot be reached. The gateway's log has the reason. Try again later."
    return ApiError(503, "issuer_unavailable", message, retry_after_s=5.0)
