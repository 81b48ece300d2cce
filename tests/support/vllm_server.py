"""vLLM server with the bundled model or another one, if its CPU build is installed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from argosy.models import BUNDLED_MODEL

ROOT = Path(__file__).parents[2]
PEER = Path(os.environ.get("ARGOSY_VLLM", ROOT / ".venv-peers" / "vllm"))
PYTHON = PEER / "bin" / "python"
CONTEXT = 1024
ENVIRONMENT = {
    "LD_PRELOAD": str(PEER / "lib" / "libiomp5.so"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class VllmServer:
    """vLLM server and its engine process, on a Unix socket."""

    socket: Path
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=lambda: ENVIRONMENT)
    model: Path = BUNDLED_MODEL
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            self.command(),
            cwd=self.socket.parent,
            env={**os.environ, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def command(self) -> list[str | Path]:
        return [
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--served-model-name", "mini", "--uds", self.socket, "--dtype", "bfloat16"),
            *("--max-model-len", str(CONTEXT), "--max-num-seqs", "4", "--enforce-eager"),
            *("--uvicorn-log-level", "warning", *self.options),
        ]

    def wait_ready(self) -> None:
        while not self._is_ready():
            assert self.process.poll() is None
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.socket))
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: vllm\r\n\r\n")
                return connection.recv(64).startswith(b"HTTP/1.1 200")
            except OSError:
                return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the server."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def run_vllm_servers(*servers: VllmServer) -> Iterator[None]:
    """Run these servers until the end of the context."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_ready()
        yield
    finally:
        for server in servers:
            server.kill()
