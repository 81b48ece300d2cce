"""Count the instructions that the gateway executes for a small request, without the noise of timings.

    python -m benchmarks.record instructions [--proxies argosy-without-console,argosy] [--starts 3] [--requests 200]

Needs valgrind. A gateway runs under Callgrind, and gets requests one after another over one connection. What it
executes in the same time without requests is taken off, which is exact on a quiet machine only. Prints a JSON line for
each start of a proxy, then a table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2

from benchmarks import wire
from benchmarks.options import parse_choices
from benchmarks.peers.catalog import ROOT
from benchmarks.processes import exit_on_sigterm
from benchmarks.proxies import MODEL, PROXIES, Place, Proxy, Running, Start, running

DEFAULT = ["argosy-without-console", "argosy"]
WARM_UP_REQUESTS = 50
SETTLE_S = 45.0
"""Time before a count, in which each kind of work beside requests runs for the first time, which is dear."""
IDLE_S = 20.0
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


class Callgrind:
    """A process under Callgrind."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        self._folder = folder

    def control(self, *arguments: str) -> None:
        """Send a command to the process."""
        subprocess.run(
            ["callgrind_control", *arguments, str(self._pid)], check=True, capture_output=True
        )

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Count what the process executes in the context, whose list has the number afterwards."""
        count: list[int] = []
        before = set(self._folder.glob("callgrind.out.*"))
        self.control("-z")
        yield count
        self.control("-d")
        (dump,) = set(self._folder.glob("callgrind.out.*")) - before
        found = re.search(r"^(?:totals|summary): (\d+)", dump.read_text(), re.MULTILINE)
        assert found is not None, f"{dump} has no total"  # noqa: S101 - Callgrind writes it always
        count.append(int(found[1]))
        dump.unlink()


def under_callgrind(proxy: Proxy) -> Proxy:
    """Return the proxy with a start command under Callgrind."""

    def start(place: Place) -> Start:
        found = proxy.start(place)
        output = f"--callgrind-out-file={place.folder}/callgrind.out.%p"
        valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", output]
        return Start([*valgrind, *found.command], found.key)

    return dataclasses.replace(proxy, start=start)


def measure(route: Running, folder: Path, requests: int) -> dict[str, float]:
    """Return the instructions of one request, and of a second without requests."""
    assert route.process is not None  # noqa: S101 - `running` started it
    callgrind = Callgrind(route.process.pid, folder)
    headers = {"authorization": f"Bearer {route.key}"}
    with httpx2.Client(
        base_url=f"http://127.0.0.1:{route.port}", headers=headers, timeout=120, trust_env=False
    ) as client:

        def send(count: int) -> float:
            started_at = time.monotonic()
            for _ in range(count):
                client.post("/v1/chat/completions", json=BODY).raise_for_status()
            return time.monotonic() - started_at

        callgrind.control("-i", "on")
        send(WARM_UP_REQUESTS)
        time.sleep(SETTLE_S)
        with callgrind.counted() as idle:
            time.sleep(IDLE_S)
        with callgrind.counted() as busy:
            seconds = send(requests)
    per_second = idle[0] / IDLE_S
    return {
        "instructions_per_request": round((busy[0] - per_second * seconds) / requests),
        "instructions_per_idle_s": round(per_second),
        "instructions_with_background": round(busy[0] / requests),
        "requests_s": round(requests / seconds, 1),
    }


def main() -> None:
    """Measure all starts, then print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cores = sorted(os.sched_getaffinity(0))
    cache = Path(tempfile.gettempdir()) / "argosy-bench"
    parser.add_argument("--proxies", type=parse_choices(tuple(PROXIES)), default=DEFAULT)
    parser.add_argument("--starts", type=int, default=3, help="processes of each proxy")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=cache, help="folder for programs and logs")
    options = parser.parse_args()
    exit_on_sigterm()
    program = wire.build_program("upstream", options.folder)
    folder = Path(tempfile.mkdtemp(prefix="instructions-", dir=options.folder))
    found: dict[str, list[float]] = {name: [] for name in options.proxies}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        upstream = stack.enter_context(wire.upstream(program, cores[-1]))
        for number in range(options.starts):
            for name in options.proxies:
                place = folder / f"{name}-{number}"
                proxy = under_callgrind(PROXIES[name])
                with running(proxy, upstream, cores[0], place, ROOT / ".venv-peers") as route:
                    figures = measure(route, place, options.requests)
                found[name].append(figures["instructions_per_request"])
                print(json.dumps({"proxy": name, "start": number, **figures}), flush=True)
    print("| proxy | instructions per request | range |\n|---|---:|---:|")
    for name, counts in found.items():
        print(
            f"| {name} | {statistics.median(counts):,.0f} | {min(counts):,.0f} to {max(counts):,.0f} |"
        )


if __name__ == "__main__":
    main()
