"""`argosy up` as a user starts it: a fleet that repairs itself, changes as declared, and ends with `argosy down`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import psutil
import pytest
from tests.support.console_browser import CHROMIUM, launch_chromium, show_screen, sign_in
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "laptop.yaml"
SCAN_INTERVAL_S = 0.2
"""Pause between scans of all processes of this machine."""
CHAT = {
    "messages": [{"role": "user", "content": "Count to three."}],
    "max_tokens": 8,
    "temperature": 0,
}


class Commands:
    """Commands about one fleet, with a state folder of its own."""

    def __init__(self, folder: Path, example: Path = EXAMPLE) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.overlay = folder / "overlay.yaml"
        self._environment = os.environ | {"XDG_STATE_HOME": str(folder)}
        self.folder = folder
        self.example = example

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
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                state = process.environ().get("XDG_STATE_HOME")
                if "argosy.cli" in command[:4] and state == str(self.folder):
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

    def kill_processes(self) -> None:
        """Kill all that is left of the fleet on this machine."""
        for process in psutil.process_iter():  # the keeper first, which was started first
            with contextlib.suppress(psutil.Error):
                if process.environ().get("XDG_STATE_HOME") == str(self.folder):
                    process.kill()

    def chat(self) -> str:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        response = httpx2.post(url, json=CHAT | {"model": self.model}, timeout=60)
        text: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
        return text

    @property
    def model(self) -> str:
        models = httpx2.get(f"http://127.0.0.1:{self.port}/v1/models", timeout=60).json()
        model: str = models["data"][0]["id"]
        return model


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path)
    commands.declare()
    yield commands
    commands.kill_processes()


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
    (revision,) = msgspec.json.decode(fleet.run("history", "--json"))
    assert (revision["revision"], revision["reason"]) == (1, "first")
    fleet.kill_controller()
    fleet.run("down")
    await until(lambda: not fleet.processes(), SCAN_INTERVAL_S)
    assert fleet.status()["replicas"] == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: make services")
@pytest.mark.exhaustive
async def test_console_shows_a_new_version_arrive(fleet: Commands) -> None:
    """A page that is open during the change shows the new replica, and what the controller did."""
    fleet.run("up", "--reason", "first")
    async with launch_chromium() as browser:
        page = await sign_in(browser, f"http://127.0.0.1:{fleet.port}")
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
