"""`argosy up` as a user starts it: a fleet that repairs itself, changes as declared, and ends with `argosy down`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from tests.support.console_browser import (
    CHROMIUM,
    launch_chromium,
    load_playwright,
    show_screen,
    sign_in,
)
from tests.support.state_processes import kill_processes, list_processes
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
USERS = 40
ROLLOUT_TIMEOUT_MS = 120_000
SCAN_INTERVAL_S = 0.2
"""Pause between scans of all processes of this machine."""
CHAT = {
    "messages": [{"role": "user", "content": "Count to three."}],
    "max_tokens": 8,
    "temperature": 0,
}


def without_measurements(status: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a fleet without what changes from second to second."""
    replicas = [each | {"running": 0, "cached_tokens": 0} for each in status["replicas"]]
    return status | {"lease_age_s": 0, "replicas": replicas}


class Commands:
    """Commands about one fleet, with a state folder of its own."""

    def __init__(self, folder: Path, example: str = "laptop.yaml") -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.overlay = folder / "overlay.yaml"
        self._environment = os.environ | {"XDG_STATE_HOME": str(folder)}
        self.folder = folder
        self.example = EXAMPLES / example

    def declare(self, **settings: object) -> None:
        self.overlay.write_bytes(msgspec.json.encode({"port": self.port} | settings))

    def run(self, *command: str, status: int = 0) -> str:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "argosy.cli",
                *command,
                "-f",
                str(self.example),
                "-f",
                str(self.overlay),
            ],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == status, result.stderr
        return result.stdout

    def status(self) -> dict[str, Any]:
        return msgspec.json.decode(self.run("status", "--json"), type=dict[str, Any])

    def processes(self) -> dict[str, psutil.Process]:
        """Return controller, gateway and replica by the subcommand that runs them."""
        found = {}
        for process in list_processes(self.folder):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "argosy.cli" in command[:4]:
                    found[command[command.index("argosy.cli") + 1]] = process
        return found

    def survivors(self, before: Mapping[str, psutil.Process]) -> set[psutil.Process]:
        return {*before.values()} & {*self.processes().values()}

    def kill_controller(self) -> None:
        """Kill the controller, and all keepers that would start it again."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "argosy.controller_keeper" in command and str(self.folder) in command[4]:
                    process.kill()
        self.processes()["controller"].kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(self) -> str:
        url = f"{self.url}/v1/chat/completions"
        response = httpx2.post(url, json=CHAT | {"model": self.model}, timeout=60)
        text: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
        return text

    @contextlib.asynccontextmanager
    async def chatting(self) -> AsyncIterator[Counter[str]]:
        """Send requests of changing users. Yields the number of responses by version."""
        versions: Counter[str] = Counter()

        async def send() -> None:
            async with httpx2.AsyncClient(base_url=self.url, timeout=60) as client:
                for number in itertools.count():
                    body = CHAT | {"model": "chat", "user": f"user-{number % USERS}"}
                    response = await client.post("/v1/chat/completions", json=body)
                    response.raise_for_status()
                    versions[response.headers["x-argosy-version"]] += 1

        async with asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(send())
            yield versions
            sending.cancel()

    @property
    def model(self) -> str:
        models = httpx2.get(f"{self.url}/v1/models", timeout=60).json()
        model: str = models["data"][0]["id"]
        return model


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    commands.declare()
    yield commands
    kill_processes(tmp_path)


async def test_declared_fleet_repairs_itself(fleet: Commands) -> None:
    fleet.run("diff", status=1)
    fleet.run("up", "--reason", "first")
    fleet.run("diff")
    text = fleet.chat()
    before = fleet.processes()
    assert before.keys() == {"controller", "gateway", "replica"}
    for process in before.values():
        process.kill()
    await until(
        lambda: fleet.processes().keys() == before.keys() and not fleet.survivors(before),
        SCAN_INTERVAL_S,
    )
    fleet.run("up")  # applies nothing, and waits
    assert fleet.chat() == text
    url = f"http://127.0.0.1:{fleet.port}"
    shown = httpx2.get(f"{url}/admin/fleet", timeout=60).json()
    assert shown["url"] == url
    assert without_measurements(fleet.status()) == without_measurements(shown)
    (revision,) = msgspec.json.decode(fleet.run("history", "--json"))
    assert (revision["revision"], revision["reason"]) == (1, "first")
    fleet.kill_controller()
    fleet.run("down")
    await until(lambda: not fleet.processes(), SCAN_INTERVAL_S)
    assert fleet.status()["replicas"] == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: make services")
@pytest.mark.exhaustive
class TestConsole:
    async def test_shows_a_new_version_arrive(self, fleet: Commands) -> None:
        """A page that is open during the change shows the new replica, and what the controller did."""
        fleet.run("up", "--reason", "first")
        async with launch_chromium() as browser:
            page = await sign_in(browser, fleet.url)
            await show_screen(page, "#/models", "Models and replicas")
            replicas = page.get_by_role("region", name="Replicas", exact=True)
            old = await replicas.get_by_role("link").inner_text()
            fleet.declare(pools=[{"name": "chat", "options": {"max_seqs": 8}}])
            await asyncio.to_thread(fleet.run, "up", "--reason", "fewer sequences")
            await replicas.get_by_role("link", name=old, exact=True).wait_for(state="detached")
            await replicas.get_by_text("0 / 8").wait_for()
            events = page.get_by_role("region", name="Events of the fleet")
            await events.get_by_text(old).first.wait_for()
        fleet.run("down")

    async def test_shows_a_canary_and_aborts_it(self, fleet: Commands) -> None:
        """The gate fills with what requests measured, and an abort sends all users back to the old version."""
        fleet.example = EXAMPLES / "rollout.yaml"
        plan = {"steps": ["50%"], "shadow": 0, "min_step_s": 3600}
        fleet.declare(pools=[{"name": "chat", "rollout": plan}])
        fleet.run("up")
        fleet.declare(pools=[{"name": "chat", "rollout": plan, "options": {"max_seqs": 8}}])
        expect = load_playwright().expect
        async with launch_chromium() as browser:
            page = await sign_in(browser, fleet.url)
            await show_screen(page, "#/models", "Models and replicas")
            async with fleet.chatting() as versions:
                await asyncio.to_thread(fleet.run, "apply")
                evidence = page.get_by_role("meter", name="Errors: no worse")
                await evidence.wait_for(timeout=ROLLOUT_TIMEOUT_MS)
                await expect(evidence).not_to_have_attribute("aria-valuenow", "0")
                passed = page.get_by_role("row", name="Errors").get_by_text("passed")
                await passed.wait_for(timeout=ROLLOUT_TIMEOUT_MS)
                assert len(versions) == 2
                await page.get_by_role("button", name="Abort").click()
                dialog = page.get_by_role("dialog")
                await dialog.get_by_label("Why").fill("a test")
                await dialog.get_by_role("button", name="Abort").click()
                await page.locator(".pill", has_text="aborted").first.wait_for()
                versions.clear()
                await until(lambda: versions.total() >= USERS)
                assert len(versions) == 1
            replicas = page.get_by_role("region", name="Replicas", exact=True)
            await expect(replicas.get_by_role("link")).to_have_count(2)
        fleet.run("down")
