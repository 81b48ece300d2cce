"""Fixtures of the HTTP tests: the bundled tokenizer, and a server around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.fake_engine import FakeEngine, always, says
from tests.integration.serving import Served, serve

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.models import BUNDLED

REPLY = "Hello there. How can I help you today?"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    """Says `REPLY` to whatever it is asked, until the test scripts it."""
    return FakeEngine(tokenizer, always(says(tokenizer, REPLY)))


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serve(engine) as running:
        yield running
