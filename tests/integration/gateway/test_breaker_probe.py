"""A replica that failed gets requests again once it has generated something, whatever it says of itself."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_backend import running as listening
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_harness import front, opened
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Answer, Asked, plain, rough_server

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.pool import prober


async def fails(asked: Asked) -> None:
    asked.json(500, {"error": {"message": "out of memory"}})


async def hangs(asked: Asked) -> None:
    del asked
    await asyncio.Event().wait()


async def full(asked: Asked) -> None:
    asked.json(429, {"error": {"message": "later"}})


async def knows_no_chats(asked: Asked) -> None:
    asked.json(404, {"error": {"message": "no chats here"}})


async def probed_by(answer: Answer) -> bool:
    """Whether a server whose failures took it out gets requests again, once it was probed and has answered so."""
    async with (
        rough_server() as rough,
        front([], ReplicaConfig(url=rough.url, kind="openai")) as running,
    ):
        (replica,) = running.replicas
        opened(replica)
        rough.probed = answer
        await running.probe()
        return replica.breaker.is_closed


@pytest.mark.parametrize("answer", [fails, hangs])
async def test_one_that_only_says_that_it_is_well_gets_none(
    monkeypatch: pytest.MonkeyPatch, answer: Answer
) -> None:
    monkeypatch.setattr(prober, "TEST_GENERATION_TIMEOUT_S", 0.1)
    assert not await probed_by(answer)


@pytest.mark.parametrize("answer", [plain, full, knows_no_chats])
async def test_one_that_answers_gets_them_again(answer: Answer) -> None:
    assert await probed_by(answer)


class Restarted(LlamaCpp):
    """Once it was started again it tells its load."""

    tells: bool = False

    def pages(self) -> dict[str, object]:
        pages = super().pages()
        return pages if self.tells else {"/health": pages["/health"]}


async def test_one_that_comes_back_is_asked_anew_what_it_tells() -> None:
    double = Restarted()
    async with listening(double), front([], ReplicaConfig(url=double.url, model="cat")) as running:
        (replica,) = running.replicas
        seats = []
        for failed in (False, False, True):  # a server that lives is believed
            if failed:
                opened(replica)
            await running.probe()
            seats.append(replica.load.max_seqs)
            double.tells = True
        assert seats == [0, 0, 4]


async def test_ours_generates_a_token(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(tokenizer, lambda _: Script([100, 101]))
    async with (
        serve(engine) as served,
        front([], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        (replica,) = running.replicas
        await running.probe()
        assert not engine.requests  # nobody is asked for one while all is well
        opened(replica)
        await running.probe()
        assert replica.breaker.is_closed
    (asked,) = engine.requests
    assert asked.params.max_tokens == 1
