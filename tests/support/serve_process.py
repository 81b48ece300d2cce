"""`argosy serve` as a process of its own, and the `argosy` command, as a person starts them."""

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
REPLICA = "argosy.fleet.replica_process"
URL = re.compile(r"https?://(127\.0\.0\.1|0\.0\.0\.0):\d+")


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process
    said: Iterator[str]
    """Lines of its standard error, from the first."""

    def processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def core(self) -> psutil.Process:
        """The engine core's process, as soon as there is one that serves."""
        while httpx2.get(f"{self.url}/ready").status_code != 200:
            time.sleep(0.05)
        (core,) = [p for p in self.process.children(recursive=True) if CORE in p.cmdline()]
        return core

    def replicas(self) -> list[psutil.Process]:
        """The replicas' processes."""
        return [p for p in self.process.children() if REPLICA in p.cmdline()]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """A server from its start to its end; killed if it is still there at the end of the test."""
    command = [ARGOSY, "serve", "--port", "0", "--threads", "1", "--kv-memory", "64MiB", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        heard = []
        try:
            for line in process.stderr:
                heard.append(line)
                found = URL.search(line)
                if found:
                    break
            else:
                pytest.fail("the server ended before it was ready")
            url = found.group().replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - the other way round
            yield Server(url, psutil.Process(process.pid), chain(heard, process.stderr))
        finally:
            process.kill()


def argosy(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ARGOSY, *arguments], input=typed, capture_output=True, text=True, check=False
    )
