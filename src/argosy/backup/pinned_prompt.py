"""Answer of a gateway and a replica that are started on the restored store of a backup."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from argosy.backup.backup_manifest import BackupError
from argosy.process import create_socket_folder
from argosy.store import open_existing_store

START_TIMEOUT_S = 600.0
POLL_INTERVAL_S = 0.2
STOP_TIMEOUT_S = 60.0
MAX_TOKENS = 16
_SHOWN_LOG_BYTES = 500


def answer_prompt(store_url: str, prompt: str, model: str | None) -> str:
    """Start `argosy serve` on a store, and return what it answers to a prompt without random sampling.

    The request has a key of a new organisation, so it passes authentication, limits, routing and the ledger. The store
    must be a copy.

    Args:
        store_url: URL of the store.
        prompt: Message of the user.
        model: Model to load as `argosy serve` takes it; None for the bundled one.

    Raises:
        BackupError: The server does not start, or does not answer.
    """
    folder = create_socket_folder("argosy-prompt-", len("s.sock"))
    socket, log = folder / "s.sock", folder / "log"
    command = [sys.executable, "-m", "argosy.cli", "serve", *([] if model is None else [model])]
    command += ["--uds", str(socket), "--store", store_url, "--no-console"]
    try:
        key = _create_key(store_url)
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the program and options are our own
                command,
                stdout=output,
                stderr=output,
                env=os.environ | {"XDG_STATE_HOME": str(folder)},
            )
        try:
            with httpx2.Client(
                base_url="http://localhost",
                headers={"authorization": f"Bearer {key}"},
                transport=httpx2.HTTPTransport(uds=str(socket)),
                timeout=START_TIMEOUT_S,
                trust_env=False,
            ) as client:
                _wait_until_ready(client, process, log)
                return _ask(client, prompt)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            process.kill()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _create_key(store_url: str) -> str:
    name = f"verify-{secrets.token_hex(8)}"
    with contextlib.closing(open_existing_store(store_url)) as store:
        organisation = store.accounts.create_organisation(name, actor="backup")
        project = store.accounts.create_project(organisation.id, name, actor="backup")
        _, key = store.accounts.create_key(project.id, name, actor="backup")
    return key


def _wait_until_ready(client: httpx2.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx2.HTTPError):
            if client.get("/ready").status_code == httpx2.codes.OK:
                return
        time.sleep(POLL_INTERVAL_S)
    end = log.read_bytes()[-_SHOWN_LOG_BYTES:].decode(errors="replace").strip()
    raise BackupError(f"The server did not start on the restored store. It printed: {end}")


def _ask(client: httpx2.Client, prompt: str) -> str:
    try:
        model = client.get("/v1/models").json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        response = client.post("/v1/chat/completions", json=body)
        answer: str = response.json()["choices"][0]["message"]["content"]
    except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
        raise BackupError(f"The restored gateway did not answer the prompt: {error!r}.") from error
    return answer
