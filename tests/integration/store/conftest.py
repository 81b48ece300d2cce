"""A migrated store on each database, and processes that use one at the same time."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.services import PostgresServer

from argosy.store import Store, open_store

START = 1_763_750_000.0
TEMPLATE = "migrated"


class Clock:
    """The store's clock: it stands until it is moved."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "migrated.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_server(postgres: PostgresServer) -> PostgresServer:
    """A server with a migrated database, to be copied."""
    migrate(postgres.create(TEMPLATE))
    return postgres


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated database without accounts."""
    if kind == "sqlite":
        path = tmp_path / "store.db"
        shutil.copy(request.getfixturevalue("migrated_file"), path)
        yield f"sqlite:///{path}"
    else:
        server: PostgresServer = request.getfixturevalue("migrated_server")
        with server.database(like=TEMPLATE) as url:
            yield url


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[Store]:
    opened = open_store(url, clock=clock)
    yield opened
    opened.close()


def migrate(url: str) -> None:
    store = open_store(url)
    store.migrate()
    store.close()


def at_once(count: int, what: str, url: str, *arguments: object) -> list[str]:
    """What so many processes print that do the same thing (see `worker.py`) at the same time."""
    workers = [
        subprocess.Popen(
            (
                *(sys.executable, "-m", "tests.support.store_process", what, url),
                *(str(argument) for argument in (number, *arguments)),
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        said = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    assert [worker.returncode for worker in workers] == [0] * count, said
    return [out.strip() for out, _ in said]
