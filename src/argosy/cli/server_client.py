"""A client of a running server, as the commands that talk to one use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from argosy.cli.failure import fail
from argosy.cli.output import strip_control_characters

if TYPE_CHECKING:
    import httpx2

CONNECT_TIMEOUT_S = 5.0


def open_client(url: str, api_key: str | None) -> httpx2.Client:
    """A client of the server at `url`, which may be `unix:PATH`; ends the command when that is no URL, or no key."""
    import ssl

    import httpx2

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        fail("that is no API key: it has characters that no key has; copy it again")
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
            verify=ssl.create_default_context(),  # which heeds SSL_CERT_FILE
            trust_env=False,
        )
    except (httpx2.InvalidURL, ValueError) as error:
        fail(f"{url!r} is not a URL ({error}); write it like http://127.0.0.1:8000")
    if client.base_url.scheme not in ("http", "https") or not client.base_url.host:
        fail(f"{url!r} is not a URL of a server; write it like http://127.0.0.1:8000")
    return client


def explain_connect_error(error: Exception, remedy: str) -> str:
    """Why there is no connection, and what to do: about a certificate, or `remedy`."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        remedy = "have SSL_CERT_FILE name the PEM file of the authority that vouches for it"
    return f"{str(error) or 'it takes too long'}; {remedy}"


def error_message(body: bytes) -> str:
    """What an OpenAI-shaped error body says."""
    import msgspec

    try:
        said = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        said = f"the server answered: {body[:200].decode(errors='replace')}"
    return strip_control_characters(said)
