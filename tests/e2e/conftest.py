"""One server for the tests that leave it as it was."""

from collections.abc import Iterator

import pytest
from tests.support.serve_process import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as server:
        yield server
