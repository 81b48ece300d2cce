"""A gateway in a bad environment: its log cannot be written, its limits are low, others come and go."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

GATEWAY = (sys.executable, "-m", "argosy.cli", "gateway", "--config")
START_S = 60.0


def configured(folder: Path, more: str = "") -> Path:
    """The file of a gateway on a Unix socket, in front of nobody."""
    path = folder / "gateway.yaml"
    behind = "models: [{name: big, replicas: [{url: 'http://127.0.0.1:1', kind: openai}]}]"
    path.write_text(f"uds: {folder}/gateway.sock\n{behind}\n{more}")
    return path


@contextlib.contextmanager
def running(*command: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end if it is still there."""
    with subprocess.Popen(command, text=True, **settings) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def asked(folder: Path, path: str) -> bytes:
    """What the gateway on that socket answers. Raises OSError when nobody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "gateway.sock"))
        client.sendall(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
        return client.makefile("rb").read()


def healthy(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Whether it answers, once it does or has ended."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            return b" 200 " in asked(folder, "/health")
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "<&- >&- 2>&-", "2> >(exit)"])
def test_who_cannot_say_anything_serves_all_the_same(
    tmp_path: Path, stderr: str, log_format: str
) -> None:
    config = configured(tmp_path, f"log_format: {log_format}")
    command = f"exec {' '.join(GATEWAY)} '{config}' {stderr}"
    with running("bash", "-c", command) as process:
        assert healthy(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
