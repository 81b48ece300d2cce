"""From `argosy replica` to ready with the bundled model, imports included: seconds, a row for each start."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import httpx2

STARTS = 5
PORT = 8907
READY = f"http://127.0.0.1:{PORT}/ready"


def start_s() -> float:
    """One start, in seconds; the server is stopped again."""
    argosy = Path(sys.executable).with_name("argosy")
    begin = time.perf_counter()
    with subprocess.Popen(
        [argosy, "replica", "--port", str(PORT)], stderr=subprocess.DEVNULL
    ) as it:
        while not ready():
            if it.poll() is not None:
                raise SystemExit(f"the replica ended with status {it.returncode}")
            time.sleep(0.01)
        took = time.perf_counter() - begin
        it.terminate()
    return took


def ready() -> bool:
    """Whether the replica takes requests."""
    try:
        return httpx2.get(READY).status_code == 200
    except httpx2.TransportError:
        return False


def main() -> None:
    """Print one JSON line for each start."""
    for _ in range(STARTS):
        print(json.dumps({"start_to_ready_s": round(start_s(), 2)}))


if __name__ == "__main__":
    main()
