"""Engines as processes: one computes while the others are stopped, so that each has the machine to itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import httpx2

from benchmarks.peers.catalog import ROOT, Peer
from benchmarks.peers.worker import Request, Settings, Stamps


class PeerError(Exception):
    """An engine cannot be measured; the message says why."""


def heed_sigterm() -> None:
    """From now on SIGTERM ends this process as an exception does, so that nothing that it started stays behind."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@dataclass(frozen=True, slots=True)
class Launch:
    """How an engine is started."""

    python: Path
    peer: Peer
    settings: Settings
    log: Path
    patience_s: float
    """For loading and for one answer."""

    @property
    def command(self) -> list[str]:
        """Of its process; a port at the end makes it a server."""
        settings = json.dumps(asdict(self.settings))
        return [str(self.python), "-m", f"benchmarks.peers.{self.peer.module}", settings]


class _Group:
    """A process with all that it starts."""

    def __init__(self, launch: Launch, *arguments: str) -> None:
        self.launch = launch
        with launch.log.open("w") as errors:
            self.process = subprocess.Popen(
                [*launch.command, *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.signal(signal.SIGKILL)
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send it to every process of the group that is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> PeerError:
        """Why it ended, as far as its log tells."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)  # until the log is whole
        lines = [
            line
            for line in self.launch.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        last = lines[-1].strip() if lines else "it said nothing"
        return PeerError(f"{last[:200]} (log: {self.launch.log})")


class Session(_Group):
    """A loaded engine that is stopped except while it is asked."""

    def __enter__(self) -> Self:
        """Wait until it is loaded. Raises PeerError."""
        try:
            self.version: str = self._answer()["version"]
        except BaseException:
            super().__exit__(None, None, None)
            raise
        self.signal(signal.SIGSTOP)
        return self

    def run(self, requests: list[Request]) -> Stamps:
        """When the tokens came. Raises PeerError."""
        self.signal(signal.SIGCONT)
        _pipe(self.process.stdin).write(json.dumps(requests).encode() + b"\n")
        _pipe(self.process.stdin).flush()
        stamps: Stamps = self._answer()
        self.signal(signal.SIGSTOP)
        return stamps

    def _answer(self) -> Any:  # noqa: ANN401 - whatever the line holds
        watch = threading.Timer(self.launch.patience_s, self.signal, (signal.SIGKILL,))
        watch.start()
        try:
            line = _pipe(self.process.stdout).readline()
        finally:
            watch.cancel()
        if not line:
            raise self.failure()
        return json.loads(line)


@contextlib.contextmanager
def served(launch: Launch) -> Iterator[str]:
    """The URL of an engine's own HTTP server, once it has answered a request. Raises PeerError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with _Group(launch, str(port)) as group:
        end = time.monotonic() + launch.patience_s
        while not _answers(url):
            if group.process.poll() is not None or time.monotonic() > end:
                raise group.failure()
            time.sleep(0.2)
        yield url


def _answers(url: str) -> bool:
    try:
        models = httpx2.get(f"{url}/v1/models", timeout=5)
        if models.status_code != httpx2.codes.OK:
            return False
        body = {"model": models.json()["data"][0]["id"], "prompt": [10, 11, 12], "max_tokens": 1}
        return httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise PeerError("the process has no pipes")
    return pipe
