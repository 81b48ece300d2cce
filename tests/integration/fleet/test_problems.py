"""Situations of a running fleet: what operators read first in `argosy status`, the admin API and the events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.support.controlled_fleet import FLEET, Fleet, declare
from tests.support.gateway_client import BODIES, COMPLETION
from tests.support.migrated_store import open_migrated_store
from tests.support.waiting import until
from typer.testing import CliRunner

from argosy.cli.app import app

NAMED_WITHIN_S, GONE_WITHIN_S = 5.0, 10.0
DISK_BYTES = 16 * 1024 * 1024


class Reader:
    """Reads the first sentences of a fleet by all ways that operators have."""

    def __init__(self, fleet: Fleet, client: httpx2.AsyncClient) -> None:
        self._fleet = fleet
        self._client = client

    async def command(self, name: str) -> str:
        arguments = [name, "--fleet", FLEET, "--store", self._fleet.url]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    async def get(self, path: str) -> dict[str, Any]:
        response = await self._client.get(path)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    async def first_problem(self) -> dict[str, Any]:
        """Return the first problem of the admin API, which the console shows."""
        problems = (await self.get("/admin/fleet"))["problems"]
        return problems[0] if problems else {"severity": "", "text": ""}

    async def wait_for_problem(self, severity: str, words: str) -> str:
        """Wait until the API names a cause first, and return its sentence, which the command shows first, too."""
        async with asyncio.timeout(NAMED_WITHIN_S):
            while True:
                first = await self.first_problem()
                if words in first["text"] and first["severity"] == severity:
                    break
                await asyncio.sleep(0.05)
        shown = [
            line
            for line in (await self.command("status")).splitlines()
            if line.startswith(("Fleet ", "  PAGE", "  TICKET", "  NOTE"))
        ]  # the log of the gateway in this process stands between
        assert shown[0].startswith("Fleet demo")
        assert shown[1].startswith(f"  {severity.upper()}")
        assert words in shown[1]
        text: str = first["text"]
        return text

    async def wait_for_end(self) -> None:
        async with asyncio.timeout(GONE_WITHIN_S):
            while (await self.first_problem())["text"]:  # noqa: ASYNC110 - a condition without event
                await asyncio.sleep(0.05)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path | None]:
    """Provide a folder on a small disk of its own; None if this user may mount none."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={DISK_BYTES}"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        yield None
        return
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def fleet(disk: Path | None, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Provide a fleet whose store is on the small disk, and which notices silence early."""
    monkeypatch.setattr("argosy.policy.reconciliation.member.SILENCE_S", 0.5)
    monkeypatch.setattr("argosy.deployment.records.status.STALE_LEASE_S", 1.0)
    monkeypatch.setattr("tests.support.controlled_fleet.LEASE_S", 2.0)
    if disk is not None:
        fleet.store.close()
        fleet.url = f"sqlite:///{disk / 'argosy.db'}"
        fleet.store = open_migrated_store(fleet.url)
    return fleet


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


async def test_first_sentence_names_the_cause_and_ends_with_it(
    fleet: Fleet, disk: Path | None, tmp_path: Path
) -> None:
    errors = tmp_path / "errors"
    fleet.apply(
        declare("complete", f"errors={errors}", warm_up=False, hang_timeout_s=30.0, replicas=2)
    )

    def phase_reasons() -> list[str]:
        return [event.reason for event in fleet.events("replica_phase")]

    def is_recorded(words: str) -> Callable[[], bool]:
        return lambda: any(words in reason for reason in phase_reasons())

    async with fleet.run_gateway() as client:
        controller = fleet.start_controller("first")
        pids = await fleet.as_declared("chat-1-0", "chat-1-1")
        reader = Reader(fleet, client)
        await reader.wait_for_end()

        # drained by a person
        body = {"replica": "chat-1-0", "reason": "new disk"}
        assert (await client.post("/admin/replicas/drain", json=body)).status_code == 200
        text = await reader.wait_for_problem("page", "it is drained by")
        assert "new disk" in text
        await until(is_recorded("it is drained by"))
        assert "In the pool chat, 1 of 2 replicas serves (at least 2)." in await reader.command(
            "status"
        )
        body = {"replica": "chat-1-0"}
        assert (await client.post("/admin/replicas/undrain", json=body)).status_code == 200
        await reader.wait_for_end()

        # hung
        os.kill(pids["chat-1-1"], signal.SIGSTOP)
        try:
            await reader.wait_for_problem("page", "Replica chat-1-1: it does not answer")
            await until(is_recorded("it does not answer"))
        finally:
            os.kill(pids["chat-1-1"], signal.SIGCONT)
        await reader.wait_for_end()

        # ejected for its errors
        errors.touch()
        for _ in range(8):
            await client.post(COMPLETION, json=BODIES[COMPLETION] | {"model": "chat"})
        await reader.wait_for_problem("page", "500")
        await until(is_recorded("gateways send it no requests, because"))
        errors.unlink()
        await reader.wait_for_end()

        # killed
        os.kill(pids["chat-1-0"], signal.SIGKILL)
        await until(is_recorded("SIGKILL"))
        await reader.wait_for_end()

        if disk is None:
            pytest.skip("this user may mount no small disk")
        fleet.store.keep_reserve()
        filler = disk / "filler"
        fill(filler)
        await reader.wait_for_problem("page", "The store cannot be written")
        assert "Free space on its disk" in (await reader.first_problem())["text"]
        assert "No events are recorded at present" in await reader.command("events")
        assert "Free space on its disk" in (await reader.get("/admin/events"))["problem"]
        filler.unlink()
        await reader.wait_for_end()
        await until(lambda: fleet.events("store_unavailable"))
        fill(filler)
        await reader.command("down")
        await controller
