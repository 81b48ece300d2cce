"""What every test shares: how hypothesis behaves, the databases, and state that is not the user's own."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.support.certificates import Authority

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ("tests.support.services",)

# To draw a traceback with colours and local variables takes a tenth of a second, and hundreds are logged.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

# Timings never decide a test, so no deadlines; CI draws the same examples every time.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Whatever keeps state for its user keeps it here."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _own_trust(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test speaks with anybody else's server: to read all authorities of the system would take each client 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", Authority(tmp_path_factory.mktemp("trust")).ca)
        yield


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """What a test changes of how logs are written, as `argosy.LLM` does, is over with it."""
    yield
    structlog.reset_defaults()
