"""`argosy batch create`, `list`, `wait` and `cancel`: batches of a running gateway, over its Batch API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from typer import Argument, Option

from argosy.cli.failure import EXIT_FAILURE, fail
from argosy.cli.output import JsonOutput, print_records, print_result
from argosy.cli.quantities import format_timestamp
from argosy.cli.server_client import (
    DEFAULT_URL,
    ServerApiKey,
    ServerUrl,
    error_message,
    fail_without_server,
    open_client,
    send_json,
)
from argosy.progress_bar import ProgressBar

if TYPE_CHECKING:
    import httpx2

WAIT_INTERVAL_S = 1.0
MAX_SHOWN_ERRORS = 20
ENDED_STATUSES = frozenset({"completed", "failed", "expired", "cancelled"})
BatchArgument = Annotated[
    str, Argument(metavar="BATCH", help="Id, as `argosy batch list` prints it.")
]


def create(
    file: Annotated[
        Path, Argument(help="Requests, one JSON object a line.", exists=True, dir_okay=False)
    ],
    *,
    endpoint: Annotated[str, Option(help="Path that all lines name.")] = "/v1/chat/completions",
    window: Annotated[str, Option(help="Time for all lines: 30m to 7d.")] = "24h",
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Upload a file of requests, and let the gateway answer them when slots are free."""
    with open_client(url, api_key) as client, fail_without_server(url), file.open("rb") as content:
        form = {"purpose": "batch"}
        response = client.post("/v1/files", data=form, files={"file": (file.name, content)})
        if response.status_code != 200:
            fail(error_message(response.content))
        body = {
            "input_file_id": response.json()["id"],
            "endpoint": endpoint,
            "completion_window": window,
        }
        batch = send_json(client, "POST", "/v1/batches", body)
    print_result(batch, f"created {batch['id']}", json=json)


def list_batches(
    *,
    limit: Annotated[int, Option(min=1, max=100, help="Most batches.")] = 20,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """List the batches of the key's project, the latest first."""
    with open_client(url, api_key) as client, fail_without_server(url):
        batches = send_json(client, "GET", f"/v1/batches?limit={limit}")["data"]
    print_records(
        batches,
        ("Batch", "Status", "Answered", "Failed", "Lines", "Created", "Ends by", "Output"),
        lambda batch: (
            batch["id"],
            batch["status"],
            *(str(batch["request_counts"][name]) for name in ("completed", "failed", "total")),
            format_timestamp(batch["created_at"]),
            format_timestamp(batch["expires_at"]),
            batch["output_file_id"] or "",
        ),
        "No batches. Create one with: argosy batch create FILE",
        json=json,
    )


def wait(
    batch: BatchArgument,
    *,
    output: Annotated[
        Path | None, Option("--output", "-o", help="File for the answers, in order.")
    ] = None,
    errors: Annotated[Path | None, Option(help="File for lines without an answer.")] = None,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Wait until a batch has ended, and download its files. Exits with 1 unless all lines were answered."""
    path = f"/v1/batches/{quote(batch, safe='')}"
    with open_client(url, api_key) as client, fail_without_server(url):
        found = send_json(client, "GET", path)
        with ProgressBar("batch") as progress:
            while found["status"] not in ENDED_STATUSES:
                time.sleep(WAIT_INTERVAL_S)
                found = send_json(client, "GET", path)
                progress.update(note=_format_counts(found["request_counts"]))
        for target, field in ((output, "output_file_id"), (errors, "error_file_id")):
            if target is not None and found[field]:
                _download(client, found[field], target)
    counts, invalid = found["request_counts"], (found["errors"] or {"data": []})["data"]
    lines = [f"{batch} {found['status']}: {_format_counts(counts)}"]
    lines += [f"line {each['line']}: {each['message']}" for each in invalid[:MAX_SHOWN_ERRORS]]
    print_result(found, "\n".join(lines), json=json)
    if found["status"] != "completed" or counts["failed"]:
        fail("not all lines were answered", EXIT_FAILURE)


def cancel(
    batch: BatchArgument,
    *,
    url: ServerUrl = DEFAULT_URL,
    api_key: ServerApiKey = None,
    json: JsonOutput = False,
) -> None:
    """Cancel a batch. Its open lines end, and what has been answered stays."""
    with open_client(url, api_key) as client, fail_without_server(url):
        found = send_json(client, "POST", f"/v1/batches/{quote(batch, safe='')}/cancel")
    print_result(found, f"{batch} {found['status']}", json=json)


def _format_counts(counts: dict[str, Any]) -> str:
    return f"{counts['completed']} of {counts['total']} lines answered, {counts['failed']} failed"


def _download(client: httpx2.Client, file_id: str, target: Path) -> None:
    with client.stream("GET", f"/v1/files/{file_id}/content") as response:
        if response.status_code != 200:
            fail(error_message(response.read()))
        with target.open("wb") as file:
            for block in response.iter_bytes():
                file.write(block)
