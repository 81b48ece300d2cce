"""Measure the time from `argosy replica` to ready, imports included, and the memory of several replicas of a model.

python -m benchmarks.startup qwen2-0.5b --replicas 2
python -m benchmarks.startup qwen2-0.5b --stored gptq w8a8 gguf-q8_0 gguf-q4_k

Prints a row for each start: without the cache of packed weights, when it is created, and when it exists. Files are in
the page cache. Memory is that of the engine cores. PSS divides shared pages among the processes that share them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Self

import httpx2
import psutil

from argosy.models import BUNDLED_MODEL
from benchmarks.checkpoints import SHAPES, make_checkpoint
from benchmarks.processes import exit_on_sigterm
from benchmarks.stored_weights import KINDS, make_stored

STARTS = 5
PORT = 8907
CORE = "argosy.engine.serving.engine_core.core_process"
"""Module that an engine core runs."""
CACHES = ("off", "cold", "warm")


class Replica:
    """Replica process from its start."""

    def __init__(self, model: Path, port: int, pack_cache: str) -> None:
        argosy = [sys.executable, "-m", "argosy.cli", "replica", str(model)]
        self._url = f"http://127.0.0.1:{port}/ready"
        self._begin = time.perf_counter()
        self._process = subprocess.Popen(
            [*argosy, "--port", str(port), "--pack-cache", pack_cache, "--kv-memory", "1GiB"],
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def ready_s(self) -> float:
        """Wait until the replica is ready, and return the seconds since its start."""
        while not self._ready():
            if self._process.poll() is not None:
                raise SystemExit(f"the replica ended with status {self._process.returncode}")
            time.sleep(0.01)
        return time.perf_counter() - self._begin

    def _ready(self) -> bool:
        try:
            return httpx2.get(self._url).status_code == 200
        except httpx2.TransportError:
            return False

    def core_mib(self, kind: str) -> int:
        """Return the memory of the engine core in MiB, from its smaps_rollup: "Rss", "Pss" or "Private_Dirty"."""
        children = psutil.Process(self._process.pid).children()
        (core,) = (child for child in children if CORE in child.cmdline())
        lines = Path(f"/proc/{core.pid}/smaps_rollup").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(kind + ":"))) >> 10


def start(model: Path, cache: str, packed: Path) -> dict[str, object]:
    """Start a replica, and return its start time and memory."""
    if cache != "warm":
        for file in packed.glob("*.packed"):
            file.unlink()
    with Replica(model, PORT, "0" if cache == "off" else "32GiB") as replica:
        ready_s = replica.ready_s()
        return {
            "model": model.name,
            "pack_cache": cache,
            "start_to_ready_s": round(ready_s, 2),
            "core_rss_mib": replica.core_mib("Rss"),
            "core_private_mib": replica.core_mib("Private_Dirty"),
        }


def together(model: Path, replicas: int, size: str) -> dict[str, object]:
    """Start several replicas at the same time, and return their start time and memory."""
    with ExitStack() as stack:
        running = [stack.enter_context(Replica(model, PORT + n, size)) for n in range(replicas)]
        ready_s = max([replica.ready_s() for replica in running])
        return {
            "model": model.name,
            "pack_cache": "off" if size == "0" else "warm",
            "replicas": replicas,
            "all_ready_s": round(ready_s, 2),
            "cores_pss_mib": sum(replica.core_mib("Pss") for replica in running),
        }


def main() -> None:
    """Print one JSON line for each start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["bundled", *SHAPES], nargs="?", default="bundled")
    parser.add_argument("--stored", nargs="*", choices=KINDS, default=[], help="formats of copies")
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "argosy-bench")
    options = parser.parse_args()
    exit_on_sigterm()
    model = (
        BUNDLED_MODEL
        if options.model == "bundled"
        else make_checkpoint(options.model, options.folder)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        packed = Path(folder) / "argosy" / "packed"
        start(model, "cold", packed)  # builds the kernels
        copies = [make_stored(kind, model) for kind in options.stored]
        for copy, cache in product([model, *copies], CACHES):
            for _ in range(options.starts):
                print(json.dumps(start(copy, cache, packed)), flush=True)
        for size in ("0", "32GiB"):
            print(json.dumps(together(model, options.replicas, size)), flush=True)


if __name__ == "__main__":
    main()
