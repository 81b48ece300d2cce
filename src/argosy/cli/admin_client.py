"""Calls of a running gateway's admin API, and the options with which commands name the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.server_client import error_message, explain_connect_error, open_client

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx2

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


def call_admin_api(
    url: str,
    api_key: str | None,
    method: str,
    path: str,
    body: Mapping[str, object] | None = None,
    *,
    parameters: Mapping[str, object] | None = None,
    connect_remedy: str = "check --url",
) -> dict[str, Any]:
    """Call the admin API and return its JSON. Failures end the command.

    Args:
        url: URL of the gateway, or `unix:PATH`.
        api_key: API key for the `Authorization` header.
        method: HTTP method.
        path: Path of the endpoint.
        body: JSON body; None without.
        parameters: Parameters of the query. Those that are None are not sent.
        connect_remedy: What to do if no gateway answers.
    """
    import httpx2

    given = {name: str(value) for name, value in (parameters or {}).items() if value is not None}
    with open_client(url, api_key) as client:
        try:
            response = client.request(method, path, params=given, json=body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            fail(f"no gateway answers at {url}: {explain_connect_error(error, connect_remedy)}")
        except httpx2.HTTPError as error:
            fail(f"the connection to {url} broke ({error}); see the gateway's log", EXIT_FAILURE)
    return _parse_response(response, url)


def _parse_response(response: httpx2.Response, url: str) -> dict[str, Any]:
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
