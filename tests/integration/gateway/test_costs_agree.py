"""All numbers of one traffic agree, and what clients send reaches neither logs nor traces nor the store."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.integration.gateway.test_series import metric_sum
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import serve_backends
from tests.support.gateway_client import replica_config, run_gateway_server
from tests.support.gateway_processes import OrganisationAccounts, open_organisation
from tests.support.trace_sink import TraceSink, trace_sink
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, SeriesConfig, TracingConfig
from argosy.store import Price, StoreConfig, StoreError

PRICE = Price(model="big", input=700, cached_input=70, output=3100)
INPUTS = ("header", "query", "prompt", "tool", "file", "user", "model", "tenant")
CANARIES = {name: f"canary-{name}-5c1e" for name in INPUTS}
CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def run_priced_gateway(
    folder: Path,
) -> AsyncIterator[tuple[httpx2.AsyncClient, OrganisationAccounts, TraceSink, str]]:
    """Run a gateway with a store, prices, series and traces, and a key of a project that is named by a canary."""
    url = f"sqlite:///{folder / 'argosy.db'}"
    with trace_sink() as sink, open_organisation(url) as accounts:
        accounts.store.limits_and_prices.set_price(PRICE, actor="test")
        key = accounts.key(
            accounts.project(CANARIES["tenant"]), "all", role="admin", scope="gateway"
        )
        async with serve_backends(backend := Vllm()):
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name="big", replicas=[replica_config(backend)])],
                store=StoreConfig(url=url),
                series=SeriesConfig(file=str(folder / "series.sqlite")),
                tracing=TracingConfig(endpoint=sink.url, sample_ratio=1),
            )
            async with run_gateway_server(config) as (_, client):
                client.headers["authorization"] = f"Bearer {key}"
                yield client, accounts, sink, key


async def test_six_sources_have_the_same_numbers(tmp_path: Path) -> None:
    """Console, ledger, series, metrics, FOCUS and spans."""
    async with run_priced_gateway(tmp_path) as (client, accounts, sink, _):
        body = {"model": "big", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7}
        for fields in ({}, {"stream": True}, {"n": 2}):
            assert (await client.post(CHAT, json=body | fields)).status_code == 200
        await until(lambda: accounts.store.ledger.report()[0].requests == 3)
        (ledger,) = accounts.store.ledger.report()
        assert ledger.nano_dollars > 0
        (console,) = (await client.get("/admin/usage")).json()["data"]
        names = ("requests", "input_tokens", "cached_tokens", "output_tokens", "nano_dollars")
        assert [console[name] for name in names] == [getattr(ledger, name) for name in names]

        exposition = (await client.get("/metrics")).text
        assert round(metric_sum(exposition, "cost_dollars_total") * 10**9) == ledger.nano_dollars
        assert metric_sum(exposition, "tokens_total", 'kind="output"') == ledger.output_tokens

        text = (await client.get("/admin/usage.csv", params={"format": "focus-1.3"})).text
        focus = list(csv.DictReader(io.StringIO(text)))
        billed = sum(Decimal(row["BilledCost"]) for row in focus)
        assert billed * 10**9 == ledger.nano_dollars
        assert sum(int(row["ConsumedQuantity"]) for row in focus) == (
            ledger.input_tokens + ledger.output_tokens
        )

        series: dict[str, float] = {}
        while series.get("requests") != 3:
            answer = (await client.get("/admin/series", params={"scope": "fleet"})).json()
            series = {
                name: sum(value for value in answer["metrics"][name] if value is not None)
                for name in ("requests", "output_tokens", "cost_nano_dollars")
            }
        assert series["cost_nano_dollars"] == ledger.nano_dollars
        assert series["output_tokens"] == ledger.output_tokens

        (advice,) = (await client.get("/admin/costs/advice")).json()["data"]
        assert (advice["model"], advice["replicas"], advice["advised_replicas"]) == ("big", 1, 1)
        assert advice["verdict"] == "unknown"

        await until(lambda: len(sink.traces()) >= 3)
    costs = [
        pair.value.double_value
        for span in sink.spans
        for pair in span.attributes
        if pair.key == "gen_ai.usage.cost"
    ]
    assert len(costs) == 3
    assert round(sum(costs) * 10**9) == ledger.nano_dollars


async def test_what_clients_send_is_in_no_log_no_trace_and_not_in_the_store(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with run_priced_gateway(tmp_path) as (client, accounts, sink, key):
            tool = {"name": CANARIES["tool"], "parameters": {"type": "object"}}
            parts = [
                {"type": "text", "text": CANARIES["prompt"]},
                {"type": "file", "file": {"filename": CANARIES["file"], "file_data": "aGk="}},
            ]
            body = {
                "model": "big",
                "messages": [{"role": "user", "content": CANARIES["prompt"]}],
                "tools": [{"type": "function", "function": tool}],
                "user": CANARIES["user"],
                "max_tokens": 3,
            }
            for fields in (
                {},
                {"messages": [{"role": "user", "content": parts}]},
                {"model": CANARIES["model"]},
            ):
                await client.post(
                    f"{CHAT}?q={CANARIES['query']}",
                    json=body | fields,
                    headers={"x-canary": CANARIES["header"], "cookie": CANARIES["header"]},
                )
            await until(lambda: accounts.store.ledger.report()[0].requests >= 1)
            await until(lambda: len(sink.traces()) >= 1)
    for text in (repr(logs).encode(), b"".join(sink.bodies)):
        assert [name for name, canary in CANARIES.items() if canary.encode() in text] == []
        assert key.encode() not in text
    assert [entry["status"] for entry in logs if entry["event"] == "request"] == [200, 200, 404]
    stored = read_files(tmp_path)
    assert [name for name, canary in CANARIES.items() if canary.encode() in stored] == ["tenant"]
    assert key.encode() not in stored


async def test_content_of_others_is_explained_to_readers_in_the_audit_log_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    explanations: dict[str, dict[str, Any]] = {}

    async def explain(_: object, request: str, *__: object) -> dict[str, Any]:
        return explanations[request]

    monkeypatch.setattr("argosy.gateway.request_explainer.RequestExplainer.explain", explain)
    async with run_priced_gateway(tmp_path) as (client, accounts, _, _key):
        reader = (await client.get("/admin/me")).json()
        caller = {"organisation": accounts.organisation, "project": reader["project"], "user": ""}
        own = {"caller": caller | {"key": reader["key"]}, "replica_report": {"prompts": ["x"]}}
        other = own | {"caller": caller | {"key": "key_of_another"}}
        explanations |= {"own": own, "other": other, "bare": other | {"replica_report": None}}

        async def read(request: str) -> int:
            return (await client.get(f"/admin/requests/{request}")).status_code

        assert [await read(request) for request in explanations] == [200, 200, 200]
        audit = accounts.store.audit_log.for_organisation(accounts.organisation)
        (entry,) = audit.list_entries(action_prefix="content.read")
        assert (entry.subject, entry.actor) == ("other", f"key:{reader['key']}")

        def fail(*_: object, **__: object) -> None:
            raise StoreError("The disk is full.")

        monkeypatch.setattr("argosy.store.ContentAccess.record_read", fail)
        assert [await read(request) for request in explanations] == [200, 503, 200]


def read_files(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
