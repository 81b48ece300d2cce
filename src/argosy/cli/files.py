"""`argosy files`: the files that a project keeps at a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.failure import fail
from argosy.cli.output import JsonOutput, print_records
from argosy.cli.quantities import format_size, format_timestamp, parse_duration
from argosy.cli.server_client import (
    DEFAULT_URL,
    ServerApiKey,
    ServerUrl,
    error_message,
    fail_without_server,
    open_client,
    send_json,
)
from argosy.process import format_os_error

if TYPE_CHECKING:
    from collections.abc import Mapping

app = typer.Typer(help="Files that a project keeps at a gateway.", no_args_is_help=True)
FileArgument = Annotated[str, typer.Argument(metavar="ID", help="Id of the file.")]


@app.command("list")
def list_files(
    *,
    purpose: Annotated[str | None, typer.Option(help="Only files of this purpose.")] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List the latest 10,000 files of the key's project."""
    query = {} if purpose is None else {"purpose": purpose}
    found = _send(url, api_key, "GET", "/v1/files", params=query)["data"]
    print_records(
        found,
        ("File", "Bytes", "Purpose", "Created", "Expires", "Id"),
        lambda file: (
            file["filename"],
            format_size(file["bytes"]),
            file["purpose"],
            format_timestamp(file["created_at"]),
            format_timestamp(file["expires_at"]) if "expires_at" in file else "never",
            file["id"],
        ),
        "The project has no files.",
        json=json,
    )


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(help="The file.")],
    *,
    purpose: Annotated[
        str, typer.Option(help="assistants, batch, fine-tune, vision, user_data or evals.")
    ] = "user_data",
    expires: Annotated[
        str | None, typer.Option(help="Time until it is deleted, from 1h to 30d.")
    ] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
) -> None:
    """Upload a file, and print its id."""
    fields = {"purpose": purpose}
    if expires is not None:
        seconds = str(int(parse_duration(expires)))
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
    try:
        with path.open("rb") as content:
            form = {"file": (path.name, content)}
            typer.echo(_send(url, api_key, "POST", "/v1/files", data=fields, files=form)["id"])
    except OSError as error:
        fail(format_os_error(error))


@app.command()
def download(
    file_id: FileArgument,
    output: Annotated[Path, typer.Argument(help="Where to write it.")],
    *,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
) -> None:
    """Write the content of a file. An interrupted download leaves `OUTPUT.part`."""
    part = output.with_name(f"{output.name}.part")
    path = f"/v1/files/{file_id}/content"
    with (
        open_client(url, api_key) as client,
        fail_without_server(url),
        client.stream("GET", path) as response,
    ):
        if response.status_code != 200:
            fail(error_message(response.read()))
        try:
            with part.open("wb") as file:
                for block in response.iter_bytes():
                    file.write(block)
            part.replace(output)
        except OSError as error:
            fail(format_os_error(error))


@app.command()
def delete(
    file_id: FileArgument, *, url: ServerUrl = DEFAULT_URL, api_key: ServerApiKey = None
) -> None:
    """Delete a file."""
    _send(url, api_key, "DELETE", f"/v1/files/{file_id}")
    typer.echo(f"{file_id} is deleted.")


def _send(
    url: str,
    api_key: str | None,
    method: str,
    path: str,
    **options: Any,  # noqa: ANN401 - those of httpx2
) -> Mapping[str, Any]:
    with open_client(url, api_key) as client, fail_without_server(url):
        return send_json(client, method, path, **options)
