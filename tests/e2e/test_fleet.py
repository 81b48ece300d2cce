"""`argosy up` as a user starts it: a fleet that repairs itself, changes as declared, and ends with `argosy down`."""

from __future__ import annotations

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
from tests.support.state_processes import kill_processes, list_processes
from tests.support.waiting import wait_for
from typer.testing import CliRunner

from argosy.cli.app import app

EXAMPLE = Path(__file__).parents[2] / "examples/laptop.yaml"
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

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        overlay = folder / "overlay.yaml"
        overlay.write_text(f"port: {port}")
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        self._files = ["-f", str(EXAMPLE), "-f", str(overlay)]
        self._environment = os.environ | {"XDG_STATE_HOME": str(folder)}

    def run(self, *command: str) -> str:
        """Run a command in a process of its own."""
        result = subprocess.run(
            [sys.executable, "-m", "argosy.cli", *command, *self._files],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout + result.stderr

    def inspect(self, *command: str, status: int = 0) -> str:
        """Run a command that only reads in this process."""
        result = CliRunner().invoke(app, [*command, *self._files], env=self._environment)
        assert result.exit_code == status, result.output
        return result.stdout

    def status(self) -> dict[str, Any]:
        return msgspec.json.decode(self.inspect("status", "--json"), type=dict[str, Any])

    def processes(self) -> dict[str, psutil.Process]:
        """Return controller, gateway and replica by the subcommand that runs them."""
        found = {}
        for process in list_processes(self.folder):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                assert "sqlite:" not in str(command), "URLs of stores may have passwords"
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

    def chat(self) -> str:
        """Return the answer of the served model."""
        (model,) = httpx2.get(f"{self.url}/v1/models", timeout=60).json()["data"]
        url = f"{self.url}/v1/chat/completions"
        response = httpx2.post(url, json=CHAT | {"model": model["id"]}, timeout=60)
        text: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
        return text


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Commands]:
    yield Commands(tmp_path)
    kill_processes(tmp_path)


def test_declared_fleet_repairs_itself(fleet: Commands) -> None:
    fleet.inspect("diff", status=1)
    lines = fleet.run("up", "--reason", "first").splitlines()
    last = next(line for line in reversed(lines) if line.startswith("chat-1-0: "))
    assert last == "chat-1-0: ready (every gateway routes to it)"
    fleet.inspect("diff")
    text = fleet.chat()
    before = fleet.processes()
    assert before.keys() == {"controller", "gateway", "replica"}
    children = before["replica"].children(recursive=True)
    max(children, key=lambda each: each.memory_info().rss).kill()  # the engine core
    wait_for(lambda: "its engine core ended and is started again" in fleet.inspect("events"), 0.2)
    (problem, *_) = fleet.status()["problems"]
    assert "SIGKILL" in problem["text"]
    for process in before.values():
        process.kill()
    wait_for(lambda: fleet.processes().keys() == before.keys() and not fleet.survivors(before), 0.2)
    fleet.run("up")  # applies nothing, and waits
    assert fleet.chat() == text
    shown = httpx2.get(f"{fleet.url}/admin/fleet", timeout=60).json()
    assert shown["url"] == fleet.url
    assert without_measurements(fleet.status()) == without_measurements(shown)
    (revision,) = msgspec.json.decode(fleet.inspect("history", "--json"))
    assert (revision["revision"], revision["reason"]) == (1, "first")
    fleet.kill_controller()
    fleet.run("down")
    wait_for(lambda: not fleet.processes(), 0.2)
    assert fleet.status()["replicas"] == []
