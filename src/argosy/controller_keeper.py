"""Keeper of a controller on this machine: `python -m argosy.controller_keeper FOLDER COMMAND...`.

It starts the controller again whenever it ends, for as long as the fleet is declared. It does nothing else, so that it
need not be restarted itself. Where systemd or Kubernetes restarts the controller, no keeper is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Thread

from argosy.folders import open_private_log

_MODULE = "argosy.controller_keeper"
LOCK_NAME = "keeper.lock"
LOG_NAME = "controller.log"
MAX_LOG_BYTES = 16 * 1024 * 1024
LOG_CHECK_INTERVAL_S = 30.0
BASE_BACKOFF_S = 0.25
MAX_BACKOFF_S = 10.0
LOCK_TIMEOUT_S = 10.0
"""Time that a new keeper waits for another one to end, which `argosy down` may just have ended."""
LOCK_RETRY_INTERVAL_S = 0.1
HEALTHY_AFTER_S = 30.0
"""Run time of a controller after which the next restart does not wait."""


def start_keeper(folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a keeper in the background, unless one runs for this folder.

    Args:
        folder: Folder of the fleet's state. The log of the controller is there.
        command: Command line of the controller, which every user of the machine can see.
        environment: Variables of the controller in addition to those of this process.

    Raises:
        OSError: The process cannot be started.
    """
    subprocess.Popen(  # noqa: S603 - starts this program
        [sys.executable, "-P", "-m", _MODULE, str(folder), *command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ).returncode = 0  # it runs on, so its end is not awaited


def stop_keeper(folder: Path) -> bool:
    """End the keeper of a folder with its controller. Replicas and gateways run on.

    Returns whether none runs any more.
    """
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[3:5] == [_MODULE, str(folder)]:
            with contextlib.suppress(psutil.Error):
                process.terminate()
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while is_kept := has_keeper(folder):
        if time.monotonic() >= deadline:
            break
        time.sleep(LOCK_RETRY_INTERVAL_S)
    return not is_kept


def has_keeper(folder: Path) -> bool:
    """Return whether a keeper runs for a folder."""
    try:
        with (folder / LOCK_NAME).open("a") as lock:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def main(arguments: Sequence[str]) -> int:
    """Keep the controller running until it exits with status 0, or until SIGTERM."""
    folder, command = Path(arguments[0]), list(arguments[1:])
    with (folder / LOCK_NAME).open("a") as lock:
        if not _wait_for_lock(lock.fileno()):
            return 0
        signal.signal(signal.SIGTERM, _raise_exit)
        Thread(target=_bound_log, args=(folder / LOG_NAME,), daemon=True).start()
        backoff_s = BASE_BACKOFF_S
        while True:
            started_at = time.monotonic()
            status = _run(folder / LOG_NAME, command)
            if status == 0:
                return 0
            if time.monotonic() - started_at >= HEALTHY_AFTER_S:
                backoff_s = BASE_BACKOFF_S
            time.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)


def _run(log_path: Path, command: Sequence[str]) -> int:
    """Run the controller once and return its exit status. If SIGTERM ends the keeper, the controller ends too."""
    with os.fdopen(open_private_log(log_path), "ab") as log:
        process = subprocess.Popen(  # noqa: S603 - the command line of `argosy up`
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        return process.wait()
    except SystemExit:
        process.terminate()
        process.wait()
        raise


def _bound_log(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            rotate_log(path, MAX_LOG_BYTES)
        time.sleep(LOG_CHECK_INTERVAL_S)


def rotate_log(path: Path, max_bytes: int) -> None:
    """Move the content of a log that is too large to `<name>.1`. What the controller writes meanwhile may be lost.

    The controller has the file open. It does not write through a pipe, because it outlives a keeper that is killed.

    Raises:
        OSError: There is no log, or the disk has no space for the copy. Then the log is emptied all the same.
    """
    if path.stat().st_size <= max_bytes:
        return
    older_path = path.with_name(f"{path.name}.1")
    older_path.unlink(missing_ok=True)
    try:
        with path.open("rb") as log, os.fdopen(open_private_log(older_path), "ab") as older:
            shutil.copyfileobj(log, older)
    finally:
        os.truncate(path, 0)


def _raise_exit(*_: object) -> None:
    """Handle SIGTERM. It may interrupt `process.wait`, which therefore is not called here."""
    raise SystemExit(0)


def _wait_for_lock(lock: int) -> bool:
    """Return whether this is the only keeper of the folder. Waits a while, since another one may be about to end."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_RETRY_INTERVAL_S)
        else:
            return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
