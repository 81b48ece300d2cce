"""Engine processes, of which one computes while the others are stopped, so that each has the whole machine."""

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

BOUND_EXCEEDED = 4
"""Exit status of a benchmark that printed all rows, of which some exceed a bound."""


class PeerError(Exception):
    """Raised if an engine cannot be measured. The message contains the reason."""


def exit_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that all started processes are cleaned up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


@dataclass(frozen=True, slots=True)
class Launch:
    """Start parameters of an engine."""

    python: Path
    peer: Peer
    settings: Settings
    log: Path
    patience_s: float
    """Timeout for loading and for one answer, in seconds."""

    @property
    def command(self) -> list[str]:
        """Command of the engine's process. A port as additional argument makes it a server."""
        settings = json.dumps(asdict(self.settings))
        return [str(self.python), "-m", f"benchmarks.peers.{self.peer.module}", settings]


class _Group:
    """Process with all its children, in a process group."""

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
        """Send a signal to every remaining process of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def failure(self) -> PeerError:
        """Return the reason of the exit from the last line of the log."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)  # until the log is complete
        lines = [
            line
            for line in self.launch.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        last = lines[-1].strip() if lines else "the process printed nothing"
        return PeerError(f"{last[:200]} (log: {self.launch.log})")


class Session(_Group):
    """Loaded engine that is stopped except while it serves requests."""

    def __enter__(self) -> Self:
        """Wait until the engine is loaded.

        Raises:
            PeerError: The engine cannot be loaded.
        """
        try:
            self.version: str = self._answer()["version"]
        except BaseException:
            super().__exit__(None, None, None)
            raise
        self.signal(signal.SIGSTOP)
        return self

    def run(self, requests: list[Request]) -> Stamps:
        """Return the times of the tokens.

        Raises:
            PeerError: The engine failed or timed out.
        """
        self.signal(signal.SIGCONT)
        _pipe(self.process.stdin).write(json.dumps(requests).encode() + b"\n")
        _pipe(self.process.stdin).flush()
        stamps: Stamps = self._answer()
        self.signal(signal.SIGSTOP)
        return stamps

    def _answer(self) -> Any:  # noqa: ANN401 - any JSON value
        timer = threading.Timer(self.launch.patience_s, self.signal, (signal.SIGKILL,))
        timer.start()
        try:
            line = _pipe(self.process.stdout).readline()
        finally:
            timer.cancel()
        if not line:
            raise self.failure()
        return json.loads(line)


@contextlib.contextmanager
def serve_peer(launch: Launch) -> Iterator[str]:
    """Run an engine's own HTTP server, and yield its URL after it has answered a request.

    Raises:
        PeerError: The server failed or timed out.
    """
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
