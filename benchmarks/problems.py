"""Measure how long a fleet takes to name the cause of a fault, and to stop naming it after the end of the fault.

    python -m benchmarks.problems

The fleet has two replicas of the bundled model. Each fault is planted, and ended once its sentence is there:

* an operator drains a replica
* a replica is stopped by SIGSTOP, and continued
* an engine core is killed
* the replicas answer with errors
* a replica is killed
* the disk of the store is full, which needs the right to mount a small disk

The admin API names the cause first after `named_s`, and an event after `event_s`. After the end of the fault, it takes
`ended_s` until the sentence is gone. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import psutil

from benchmarks.declared_fleet import Fleet, run_fleet
from benchmarks.processes import exit_on_sigterm

FLEET, PORT = "problems", 18_340
URL = f"http://127.0.0.1:{PORT}"
OPTIONS = {"max_seqs": 16, "kv_memory": "64MiB", "threads": 1}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
FAULTS = Path(__file__).resolve().parent / "planted_faults"
TIMEOUT_S = 60.0
DISK_BYTES = 32 * 1024 * 1024


def wait_for(condition: Callable[[], object]) -> float:
    """Wait until a condition holds. Return the seconds."""
    started_at = time.monotonic()
    while not condition():
        if time.monotonic() - started_at > TIMEOUT_S:
            raise TimeoutError(f"not within {TIMEOUT_S:g} s: {first_sentence()}")
        time.sleep(0.02)
    return time.monotonic() - started_at


def get(path: str) -> dict[str, Any]:
    """Return an answer of the gateway."""
    answer: dict[str, Any] = httpx2.get(URL + path, timeout=30, trust_env=False).json()
    return answer


def first_sentence() -> str:
    """Return the sentence of the first problem; empty if there is none."""
    problems = get("/admin/fleet")["problems"]
    return str(problems[0]["text"]) if problems else ""


def has_event(words: str, after: int) -> bool:
    """Return whether an event later than number `after` names a cause, or it says that none is recorded."""
    answer = get(f"/admin/events?after={after}")
    return words in answer["problem"] or any(words in each["reason"] for each in answer["data"])


def measure(name: str, words: str, plant: Callable[[], None], end: Callable[[], None]) -> None:
    """Plant a fault, end it after its sentence has appeared, and print the times."""
    wait_for(lambda: not first_sentence())
    last = int(get("/admin/events")["last"])
    plant()
    started_at = time.monotonic()
    named_s = wait_for(lambda: words in first_sentence())
    sentence = first_sentence()
    wait_for(lambda: has_event(words, last))
    event_s = time.monotonic() - started_at
    end()
    row: dict[str, object] = {"fault": name, "named_s": round(named_s, 2)}
    row |= {"event_s": round(event_s, 2)}
    row |= {"ended_s": round(wait_for(lambda: not first_sentence()), 2), "sentence": sentence}
    print(json.dumps(row), flush=True)


def find_process(fleet: Fleet, words: str) -> psutil.Process:
    """Return the oldest process of the fleet with these words in its command line."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("XDG_STATE_HOME") == str(fleet.folder)
            if is_ours and words in " ".join(process.cmdline()):
                return process
    raise LookupError(words)


def find_replica(fleet: Fleet) -> psutil.Process:
    """Return the server process of a replica."""
    return find_process(fleet, "argosy.cli replica")


def find_core(fleet: Fleet) -> psutil.Process:
    """Return the engine core of a replica, its child that uses most memory."""
    children = find_replica(fleet).children(recursive=True)
    return max(children, key=lambda each: each.memory_info().rss)


def change_replica(verb: str) -> None:
    """Send the decision of an operator."""
    body = {"replica": "chat-1-0", "reason": "new disk"}
    httpx2.post(f"{URL}/admin/replicas/{verb}", json=body, trust_env=False).raise_for_status()


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small disk at a folder. Yields whether that is permitted."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_mounted = subprocess.run(command, check=False).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def cause_errors(errors: Path) -> None:
    """Let all replicas answer with errors, and send requests."""
    errors.touch()
    for _ in range(10):
        httpx2.post(f"{URL}/v1/chat/completions", json=CHAT, timeout=30, trust_env=False)


def declare(disk: Path | None, errors: Path) -> dict[str, Any]:
    """Return the declaration of a fleet whose store is on a disk, and whose replicas err while a file exists."""
    environment = {"PYTHONPATH": str(FAULTS), "ARGOSY_PLANTED_FAULT": f"failing={errors}"}
    pool = {"name": "chat", "model": "chat", "replicas": 2, "options": OPTIONS}
    store = {} if disk is None else {"store": {"url": f"sqlite:///{disk}/argosy.db"}}
    return {
        "fleet": FLEET,
        "port": PORT,
        "models": [{"name": "chat", "source": "argosy-mini"}],
        "pools": [pool | {"environment": environment}],
    } | store


def measure_faults(fleet: Fleet, disk: Path | None, errors: Path) -> None:
    """Measure each fault in turn."""
    measure(
        "drained",
        "drained by",
        partial(change_replica, "drain"),
        partial(change_replica, "undrain"),
    )
    stopped = find_replica(fleet)
    measure("hung", "does not answer", stopped.suspend, stopped.resume)
    core = find_core(fleet)
    measure("core killed", "its engine core ended", core.kill, lambda: None)
    measure("errors", "status 500", partial(cause_errors, errors), errors.unlink)
    measure("replica killed", "SIGKILL", find_replica(fleet).kill, lambda: None)
    if disk is None:
        return
    filler = disk / "filler"
    measure("disk full", "is full", partial(fill, filler), filler.unlink)
    fill(filler)
    started_at = time.monotonic()
    fleet.run("down")
    print(json.dumps({"down_on_a_full_disk_s": round(time.monotonic() - started_at, 2)}))
    filler.unlink()  # so that a controller ends


def main() -> None:
    """Run the fleet and all faults."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    exit_on_sigterm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="argosy-problems-")))
        is_mounted = stack.enter_context(small_disk(folder / "disk"))
        disk = folder / "disk" if is_mounted else None
        errors = folder / "errors"
        fleet = stack.enter_context(run_fleet(declare(disk, errors)))
        measure_faults(fleet, disk, errors)


if __name__ == "__main__":
    main()
