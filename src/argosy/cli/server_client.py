"""HTTP client of a running server: for requests to its models, and for the admin API of a gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import strip_control_characters

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx2

ServerUrl = Annotated[
    str, typer.Option("--url", help="URL of the server, or unix:PATH.", envvar="ARGOSY_URL")
]
ServerApiKey = Annotated[
    str | None,
    typer.Option("--api-key", help="Sent as a bearer token.", envvar="ARGOSY_API_KEY"),
]
DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 5.0
OTHER_API = "the server does not speak the OpenAI API; check --url"
GatewayUrl = Annotated[str, Option(help="URL of the gateway, or unix:PATH.", envvar="ARGOSY_URL")]
GatewayApiKey = Annotated[
    str | None,
    Option(
        "--api-key",
        "--key",
        help="API key with a role for the whole gateway: viewer to read, operator to change.",
        envvar="ARGOSY_API_KEY",
    ),
]


def open_client(url: str, api_key: str | None) -> httpx2.Client:
    """Return a client of the server at an HTTP URL, with or without `/v1`, or `unix:PATH`.

    An invalid URL or key ends the command.
    """
    import ssl

    import httpx2

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        fail("the API key contains characters that no key has; copy it again")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    transport = None
    if url.startswith("unix:"):
        transport = httpx2.HTTPTransport(uds=url.removeprefix("unix:"))
        url = "http://localhost"
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx2.Timeout(CONNECT_TIMEOUT_S, read=None)
    try:
        client = httpx2.Client(
            base_url=base,
            headers=headers,
            timeout=timeout,
            transport=transport,
            verify=ssl.create_default_context(),  # respects SSL_CERT_FILE
            trust_env=False,
        )
    except (httpx2.InvalidURL, ValueError) as error:
        fail(f"{url!r} is not a URL ({error}); write it like http://127.0.0.1:8000")
    if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
        fail(f"{url!r} is not a URL of a server; write it like http://127.0.0.1:8000")
    return client


@contextlib.contextmanager
def fail_without_server(
    url: str, remedy: str = "start one with: argosy serve", server: str = "server"
) -> Iterator[None]:
    """End the command if no server answers at `url`, or the connection breaks."""
    import httpx2

    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            remedy = (
                "set SSL_CERT_FILE to the PEM file of the authority that signed the certificate"
            )
        reason = str(error) or "the connection timed out"
        fail(f"no {server} answers at {url}: {reason}; {remedy}")
    except httpx2.HTTPError as error:
        fail(f"the connection to {url} broke ({error}); see the {server}'s log", EXIT_FAILURE)


def error_message(body: bytes) -> str:
    """Return the message of an OpenAI error body, or an excerpt of another body."""
    import msgspec

    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        message = f"the server answered: {body[:200].decode(errors='replace')}"
    return strip_control_characters(message)


def send_json(
    client: httpx2.Client,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    **options: Any,  # noqa: ANN401 - those of httpx2
) -> dict[str, Any]:
    """Return the JSON object that the server answers. An error ends the command."""
    import msgspec

    response = client.request(method, path, json=body, **options)
    if response.status_code != 200:
        fail(error_message(response.content))
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError:
        fail(OTHER_API)


def fetch_default_model(client: httpx2.Client) -> str:
    """Return the name of the server's first model. An error ends the command."""
    try:
        return str(send_json(client, "GET", "/v1/models")["data"][0]["id"])
    except (LookupError, TypeError):
        fail(OTHER_API)


def call_admin_api(
    url: str,
    api_key: str | None,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    parameters: Mapping[str, object] | None = None,
    connect_remedy: str = "check --url",
    is_optional: bool = False,
) -> dict[str, Any]:
    """Call the admin API and return its JSON. Parameters that are None are not sent. Failures end the command.

    With `is_optional`, the result is empty if there is no such path or no store.
    """
    given = {name: str(value) for name, value in (parameters or {}).items() if value is not None}
    with (
        open_client(url, api_key) as client,
        fail_without_server(url, connect_remedy, "gateway"),
    ):
        response = client.request(method, path, params=given, json=body)
    if is_optional and response.status_code == 404:
        return {}
    if response.status_code != 200:
        remedy = " Give it by --api-key or ARGOSY_API_KEY." if response.status_code == 401 else ""
        fail(error_message(response.content) + remedy)
    try:
        parsed = response.json()
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        fail(f"the server at {url} is not an Argosy gateway; check --url")
    return parsed
