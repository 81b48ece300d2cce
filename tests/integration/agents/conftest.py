"""A server with the bundled model, as `argosy serve` starts it: a gateway before a replica."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.agents.task import Server
from tests.support.serve_process import run_serve


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with run_serve() as running:
        model = running.client().models.list().data[0].id
        yield Server(f"{running.url}/v1", model)
