"""`argosy embed`: embeddings of texts by a running server, over HTTP."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_records
from argosy.cli.server_client import (
    DEFAULT_URL,
    OTHER_API,
    ServerApiKey,
    ServerUrl,
    fail_without_server,
    open_client,
    send_json,
)

if TYPE_CHECKING:
    import httpx2

SHOWN_VALUES = 4
"""Values of a vector that the table shows."""
MAX_SHOWN_CHARS = 60
"""Characters of a text that the table shows."""


def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Texts; by default the lines of standard input."),
    ] = None,
    *,
    url: ServerUrl = DEFAULT_URL,
    model: Annotated[
        str | None, typer.Option(help="Model name; by default the first one that embeds.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Name of a prompt of the model, like query.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Length to which vectors are shortened.")
    ] = None,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Embed texts with a running server."""
    inputs = texts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not inputs:
        fail("there is no text; give one as an argument, or lines on standard input")
    options = {"prompt_name": prompt_name, "dimensions": dimensions}
    fields = {name: value for name, value in options.items() if value is not None}
    with open_client(url, api_key) as client, fail_without_server(url):
        body = {"model": model or _find_model(client), "input": inputs, **fields}
        vectors = fetch_vectors(client, body)
    if json:
        _print_json(inputs, vectors)
        return
    print_records(
        list(zip(inputs, vectors, strict=True)),
        ("Text", "Size", "Embedding"),
        lambda row: (row[0][:MAX_SHOWN_CHARS], len(row[1]), _format_vector(row[1])),
        "",
        json=False,
    )


def _find_model(client: httpx2.Client) -> str:
    """Return the name of the server's first model that embeds."""
    cards = send_json(client, "GET", "/v1/models").get("data") or ()
    names = [str(card["id"]) for card in cards if "embed" in (card.get("tasks") or ())]
    if not names:
        fail(
            "no model of this server is known to embed; name one with --model, "
            "or start one with: argosy serve --embedding-model MODEL"
        )
    return names[0]


def fetch_vectors(client: httpx2.Client, body: dict[str, Any]) -> list[list[float]]:
    """Return the vectors of the texts in a request for embeddings, in their order. An error ends the command."""
    response = send_json(client, "POST", "/v1/embeddings", body)
    try:
        vectors = sorted(response["data"], key=lambda vector: vector["index"])
        return [vector["embedding"] for vector in vectors]
    except (LookupError, TypeError):
        fail(OTHER_API)


def _print_json(texts: list[str], vectors: list[list[float]]) -> None:
    """Print one line, since an indented vector has hundreds."""
    import msgspec

    records = [
        {"text": text, "embedding": vector} for text, vector in zip(texts, vectors, strict=True)
    ]
    typer.echo(msgspec.json.encode(records).decode())


def _format_vector(vector: list[float]) -> str:
    shown = ", ".join(f"{value:.4f}" for value in vector[:SHOWN_VALUES])
    return f"{shown}, ..." if len(vector) > SHOWN_VALUES else shown
