"""`argosy serve` and other `argosy` commands as processes."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import httpx2
import openai
import psutil
import pytest

ARGOSY = str(Path(sys.executable).with_name("argosy"))
CORE = "argosy.engine.serving.engine_core.core_process"
REPLICA_COMMAND = ["argosy.cli", "replica"]
URL = re.compile(r"https?://(127\.0\.0\.1|0\.0\.0\.0):\d+")


@dataclass(frozen=True)
class ServeProcess:
    """Running `argosy serve`."""

    url: str
    process: psutil.Process
    stderr_lines: Iterator[str]
    """Lines of standard error, from the first one."""

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def core(self) -> psutil.Process:
        """Wait until the server is ready, and return the engine core's process."""
        while httpx2.get(f"{self.url}/ready").status_code != 200:
            time.sleep(0.05)
        (core,) = [p for p in self.process.children(recursive=True) if CORE in p.cmdline()]
        return core

    def replicas(self) -> list[psutil.Process]:
        """Return the replica processes."""
        monitors = self.process.children()
        replicas = [replica for monitor in monitors for replica in children(monitor)]
        return [replica for replica in replicas if is_replica(replica)]

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process, or none if it has exited."""
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def is_replica(process: psutil.Process) -> bool:
    """Return whether a process runs `argosy replica`."""
    try:
        return process.cmdline()[3:5] == REPLICA_COMMAND
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@contextmanager
def run_serve(*arguments: str, program: str = ARGOSY) -> Iterator[ServeProcess]:
    """Run `argosy serve`, and yield it when it is ready. Kill it at the end, which leaves no process of it."""
    small = ("--port", "0", "--threads", "1", "--kv-memory", "64MiB")
    command = [program, "serve", *small, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                match = URL.search(line)
                if match:
                    break
            else:
                pytest.fail("the server ended before it was ready")
            url = match.group().replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - this removes the public address
            server = ServeProcess(url, psutil.Process(process.pid), chain(lines, process.stderr))
            yield server
            if process.poll() is None:
                processes = server.processes()
                process.kill()
                _, alive = psutil.wait_procs(processes, timeout=60)
                assert not alive
        finally:
            process.kill()


def run_argosy(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ARGOSY, *arguments], input=stdin, capture_output=True, text=True, check=False
    )
