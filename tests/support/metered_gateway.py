"""A gateway with a ledger, and what it shows of its requests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.gateway import ReplicaConfig
from argosy.gateway.filters.usage_recorder import UsageRecorder
from argosy.store import AccountSnapshot, Price, UsageLog, UsageRecord
from tests.integration.test_metrics import samples
from tests.support.gateway_harness import Running, front

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
PROMPT = "Tell me a story of forty bytes or so, please"


@dataclass(frozen=True)
class Books:
    """A gateway with a ledger."""

    running: Running
    spool: UsageLog

    async def ask(self, path: str = COMPLETIONS, **body: Any) -> str:  # noqa: ANN401 - a request's
        """What the gateway answers."""
        said = {"messages": [{"role": "user", "content": PROMPT}]}
        prompt = {"prompt": PROMPT} if path == COMPLETIONS else said
        answer = await self.running.client.post(
            path, json={"model": "big", "max_tokens": 30} | prompt | body
        )
        return answer.text

    def row(self) -> UsageRecord:
        """The only one's."""
        rows: list[UsageRecord] = []
        self.spool.drain(rows.extend)
        (row,) = rows
        return row

    def told(self, row: UsageRecord) -> dict[str, Any]:
        """The explanation of a request."""
        trace = self.running.traces.find(row.request)
        assert trace is not None
        return trace.to_dict()

    async def count(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 where there are none."""
        text = (await self.running.client.get("/metrics")).text
        named = f"argosy_gateway_{name}"
        return sum(
            v for n, have, v in samples(text) if n == named and labels.items() <= have.items()
        )

    async def agree(self) -> UsageRecord:
        """The only request's row, which metrics and explanation say, too."""
        row = self.row()
        counted = [
            await self.count("tokens_total", kind=kind) for kind in ("input", "cached", "output")
        ]
        fresh = row.input_tokens - row.cached_tokens
        assert counted == [fresh, row.cached_tokens, row.output_tokens]
        assert round(await self.count("cost_dollars_total") * 1e9) == row.nano_dollars
        told = self.told(row)
        prompt, cached, output = (told["tokens"][name] for name in ("prompt", "cached", "output"))
        assert (prompt, cached, output) == (row.input_tokens, row.cached_tokens, row.output_tokens)
        assert row.nano_dollars == fresh * 5 + cached + output * 20
        return row


@contextlib.asynccontextmanager
async def books(folder: Path, *urls: str, **settings: Any) -> AsyncIterator[Books]:  # noqa: ANN401 - of `front`
    """In front of other servers than ours."""
    behind = [ReplicaConfig(url=url, max_requests=1) for url in urls]
    async with kept(folder, *behind, **settings) as here:
        yield here


@contextlib.asynccontextmanager
async def kept(folder: Path, *behind: ReplicaConfig, **settings: Any) -> AsyncIterator[Books]:  # noqa: ANN401
    """In front of these."""
    spool = UsageLog(folder)
    ledger = UsageRecorder(spool)
    ledger.apply_snapshot(
        AccountSnapshot(prices=(Price(model="big", input=5, cached_input=1, output=20),))
    )
    async with front([ledger], *behind, **settings) as running:
        yield Books(running, spool)
    spool.close()


@contextlib.asynccontextmanager
async def carriable(folder: Path, url: str) -> AsyncIterator[Books]:
    """In front of a server whose answers others can carry on, if they are one text."""
    async with kept(folder, ReplicaConfig(url=url, kind="llama.cpp")) as here:
        for replica in here.running.replicas:
            replica.is_accepting = True  # it does not say so itself
        yield here
