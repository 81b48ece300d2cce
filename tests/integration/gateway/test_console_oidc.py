"""Sign-in to the console with an OpenID Connect issuer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from tests.support.organisations import AdminGateway, run_admin_gateway
from tests.support.token_issuer import OTHER_RSA_KEY, TokenIssuer, run_issuer

from argosy.deployment import AuthConfig, ConsoleConfig, JwtConfig, OidcConfig

PAGE = {"sec-fetch-site": "same-origin"}
EMAIL = "ada@example.com"
REDIRECT_URI = "http://localhost/console/sign-in/callback"


@dataclass(frozen=True)
class SignedOut:
    """A gateway, its issuer, and a browser's flow that has begun."""

    gateway: AdminGateway
    issuer: TokenIssuer
    cookie: str
    parameters: dict[str, str]
    """Parameters of the issuer's page."""

    async def finish(
        self, *, state: str | None = None, code: str = "good", cookie: str | None = None
    ) -> str:
        """Return from the issuer. Returns the cookie of the session, or the code of the error."""
        response = await self.gateway.client.get(
            "/console/sign-in/callback",
            params={
                "code": code,
                "state": state or self.parameters["state"],
                "iss": self.issuer.url,
            },
            headers={
                "cookie": self.cookie if cookie is None else cookie,
                "sec-fetch-site": "cross-site",
            },
        )
        self.gateway.client.cookies.clear()
        assert response.status_code == 302
        _, _, error = response.headers["location"].partition("sign_in_error=")
        if error:
            return error
        assert response.headers["location"] == "../../"
        cookies = response.headers.get_list("set-cookie")
        return next(one for one in cookies if one.startswith("__Host-argosy=")).partition(";")[0]


@pytest.fixture
async def flow(tmp_path: Path) -> AsyncIterator[SignedOut]:
    with run_issuer() as issuer:
        auth = AuthConfig(jwt=JwtConfig(issuer=issuer.url, audience=("console",)))
        oidc = OidcConfig(client_id="console", redirect_uri=REDIRECT_URI)
        console = ConsoleConfig(oidc=oidc)
        async with run_admin_gateway(tmp_path, auth=auth, console=console) as gateway:
            organisation = gateway.create_organisation("customer")
            user = {"organisation": organisation, "email": EMAIL, "role": "viewer"}
            await gateway.create("/admin/users", user)
            response = await gateway.client.get("/console/sign-in/start", headers=PAGE)
            gateway.client.cookies.clear()
            location = urlsplit(response.headers["location"])
            assert (
                f"{location.scheme}://{location.netloc}{location.path}" == f"{issuer.url}/authorize"
            )
            parameters = dict(parse_qsl(location.query))
            assert parameters["redirect_uri"] == REDIRECT_URI
            issuer.code_challenge = parameters["code_challenge"]
            issuer.id_token = issuer.token(aud="console", email=EMAIL, nonce=parameters["nonce"])
            cookie = response.headers["set-cookie"]
            assert {"Secure", "HttpOnly", "SameSite=Lax"} <= set(cookie.split("; "))
            yield SignedOut(gateway, issuer, cookie.partition(";")[0], parameters)


async def test_flow_opens_a_session_that_ends_with_its_user(flow: SignedOut) -> None:
    cookie = await flow.finish()
    assert cookie.startswith("__Host-argosy=")
    client, headers = flow.gateway.client, PAGE | {"cookie": cookie}
    who = (await client.get("/console/session", headers=headers)).json()
    assert (who["role"], who["scope"], who["is_local"]) == ("viewer", "organisation", False)
    (user,) = [one for one in flow.gateway.store.accounts.list_users() if one.email == EMAIL]
    await client.post(f"/admin/users/{user.id}/disable", headers=flow.gateway.root_headers)
    assert (await client.get("/admin/keys", headers=headers)).status_code == 401


async def test_open_stream_follows_the_role_of_its_user(flow: SignedOut) -> None:
    """A user who loses a role loses what it shows at the next tick. One who loses all roles is signed out."""
    headers, root = PAGE | {"cookie": await flow.finish()}, flow.gateway.root_headers
    client = flow.gateway.client
    (user,) = [one for one in flow.gateway.store.accounts.list_users() if one.email == EMAIL]
    ticks: list[bool] = []
    async with (
        asyncio.timeout(30),
        client.stream("GET", "/console/events", headers=headers) as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith('data: {"at"'):
                ticks.append('"running"' in line)
                change = {
                    1: {"scope": "gateway"},
                    2: {"scope": "organisation"},
                    3: {"role": "user"},  # who needs a project
                }.get(len(ticks))
                if change:
                    path = f"/admin/users/{user.id}"
                    assert (await client.patch(path, json=change, headers=root)).status_code == 200
            elif line == "event: session_ended":
                break
    assert ticks == [False, True, False]


@pytest.mark.parametrize(
    "fault", ["state", "code", "cookie", "nonce", "audience", "key", "challenge"]
)
async def test_answer_of_another_flow_or_issuer_is_refused(flow: SignedOut, fault: str) -> None:
    issuer, nonce = flow.issuer, flow.parameters["nonce"]
    match fault:
        case "nonce":
            issuer.id_token = issuer.token(aud="console", email=EMAIL, nonce="another")
        case "audience":
            issuer.id_token = issuer.token(aud="another", email=EMAIL, nonce=nonce)
        case "key":
            issuer.id_token = issuer.token(OTHER_RSA_KEY, aud="console", email=EMAIL, nonce=nonce)
        case "challenge":
            issuer.code_challenge = "another"
    other = {"state": {"state": "x"}, "code": {"code": "x"}, "cookie": {"cookie": "a=b"}}
    assert await flow.finish(**other.get(fault, {})) in {"sign_in_failed", "invalid_token"}
