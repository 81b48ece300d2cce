"""Shared server of the tests that do not change its state."""

from collections.abc import Iterator

import pytest
from tests.support.serve_process import ServeProcess, run_serve


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    with run_serve() as server:
        yield server
