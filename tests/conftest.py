"""Configuration of all tests: hypothesis profiles, databases, and state outside the user's own folders."""

import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.support.certificates import Authority

# A shell that starts the tests in the background makes them and their processes ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

# More workers than cores run torch. Threads of OpenMP that wait for others would use the cores that those need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

pytest_plugins = ("tests.support.services",)

# A traceback with colours and local variables takes a tenth of a second, and hundreds are logged.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

# Timings never decide a test, so no deadlines. CI draws the same examples every time.
# `--hypothesis-profile=exhaustive` draws more examples.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("exhaustive", deadline=None, max_examples=500)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, and exclude all objects that exist then from later collections.

    Test items and the modules that they import are millions of permanent objects. Each collection that a test or
    `argosy.LLM` requests would scan them for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files of all folders. Many unit tests, which are the shortest, come last.

    Tests of processes wait much, and others compute. If workers run both kinds at the same time, no core is idle.
    """
    files: dict[str, dict[Path, None]] = {}
    for item in items:
        files.setdefault(_folder(item), {})[item.path] = None
    positions = {
        path: (index + 0.5) / len(paths) * (1.0 if folder == "unit" else 0.6)
        for folder, paths in files.items()
        for index, path in enumerate(paths)
    }
    items.sort(key=lambda item: positions[item.path])


def _folder(item: pytest.Item) -> str:
    """Return the folder in `tests` that contains a test."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture(scope="session", autouse=True)
def _isolated_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Replace the user's state folder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        state_folder = tmp_path_factory.mktemp("state")
        monkeypatch.setenv("XDG_STATE_HOME", str(state_folder))
        yield state_folder


@pytest.fixture(scope="session", autouse=True)
def _test_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trust a test authority only, because each client would read the system's authorities in 40 ms."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SSL_CERT_FILE", Authority(tmp_path_factory.mktemp("trust")).ca)
        yield


@pytest.fixture(scope="session", autouse=True)
def _uncached_loggers() -> Iterator[None]:
    """Keep loggers from caching one test's configuration, which `capture_logs` of a later test cannot change."""
    configure: Callable[..., None] = structlog.configure

    def configure_uncached(**options: object) -> None:
        configure(**{**options, "cache_logger_on_first_use": False})

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(structlog, "configure", configure_uncached)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cached_commands() -> Iterator[None]:
    """Build the tree of all commands once, which Typer's runner does in 60 ms for each command that a test runs."""
    from typer.main import get_command

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


@pytest.fixture(autouse=True)
def _default_logging() -> Iterator[None]:
    """Restore the logging configuration, which `argosy.LLM` and commands that run a server change."""
    yield
    structlog.reset_defaults()
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    for handler in [*root.handlers]:
        if isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter):
            root.removeHandler(handler)  # its stream may be that of a command that has ended
