"""Export of traces: what receivers get of requests that fail over, are refused, or are not sampled."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import QUICK_TIMEOUTS, parse_stream, run_gateway_server
from tests.support.gateway_processes import open_organisation
from tests.support.replica_servers import MODEL, serve
from tests.support.trace_sink import PHOENIX, grpc_sink, phoenix, rotel, trace_sink
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, TracingConfig
from argosy.engine import EngineFailedError
from argosy.engine.serving.text import Tokenizer
from argosy.gateway import GatewayServer
from argosy.store import Price, StoreConfig

TOKENS = list(range(100, 112))
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CANARY = "canary-4711"
BODY = {
    "model": "big",
    "messages": [{"role": "user", "content": f"Tell me about {CANARY}"}],
    "max_tokens": 12,
    "temperature": 0.5,
    "stream": True,
}


@contextlib.asynccontextmanager
async def run_traced(
    tokenizer: Tokenizer,
    tracing: TracingConfig,
    *,
    crashes: int = 0,
    store: StoreConfig | None = None,
) -> AsyncIterator[httpx2.AsyncClient]:
    """Run a gateway with two native replicas, of which the first one fails in the middle of some streams."""
    left = [crashes]

    def crash(_: object) -> Script:
        left[0] -= 1
        is_crash = left[0] >= 0
        error = EngineFailedError("gone") if is_crash else None
        return Script(TOKENS[:5] if is_crash else TOKENS, finish="length", crash=error)

    engines = [FakeEngine(tokenizer, crash) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        served = [await stack.enter_async_context(serve(engine)) for engine in engines]
        replicas = [
            ReplicaConfig(url=each.url, model=MODEL, name=f"big-{index}")
            for index, each in enumerate(served)
        ]
        model = ModelConfig(name="big", routing="round-robin", replicas=replicas)
        config = GatewayConfig(
            port=0, models=[model], timeouts=QUICK_TIMEOUTS, tracing=tracing, store=store
        )
        _, client = await stack.enter_async_context(run_gateway_server(config))
        yield client


def read(span: Any) -> dict[str, object]:  # noqa: ANN401 - protobuf's class
    values = {pair.key: pair.value for pair in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


@pytest.mark.parametrize("collector", [None, "http/protobuf", "grpc"])
async def test_failover_is_one_trace_with_one_generation(
    tokenizer: Tokenizer, tmp_path: Path, collector: Literal["http/protobuf", "grpc"] | None
) -> None:
    """The caller's trace goes on over both attempts, and tokens are counted once."""
    async with contextlib.AsyncExitStack() as stack:
        sink = stack.enter_context(trace_sink())
        url = sink.url
        if collector is not None:
            url = await stack.enter_async_context(rotel(sink, tmp_path, collector))
        tracing = TracingConfig(endpoint=url, sample_ratio=0, protocol=collector)
        async with run_traced(tokenizer, tracing, crashes=1) as client:
            headers = {
                "traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00",
                "tracestate": "vendor=1,ot=th:8",
                "x-request-id": CANARY,
            }
            response = await client.post("/v1/chat/completions", json=BODY, headers=headers)
            assert parse_stream(response.text).is_complete
            explained = await client.get(f"/admin/requests/{response.headers['x-argosy-request']}")
            assert explained.json()["trace_id"] == TRACE_ID
        await until(lambda: sink.spans)
    (spans,) = [sink.traces()[TRACE_ID]]
    by_name = {span.name: span for span in spans}
    assert sorted(by_name) == [
        "POST /v1/chat/completions",
        "attempt big-0",
        "attempt big-1",
        "chat big",
        "engine decode",
        "engine prefill",
        "engine queue",
    ]
    server, generation = by_name["POST /v1/chat/completions"], by_name["chat big"]
    first, second = by_name["attempt big-0"], by_name["attempt big-1"]
    assert server.parent_span_id.hex() == CALLER_ID
    assert generation.parent_span_id == server.span_id
    assert first.parent_span_id == second.parent_span_id == generation.span_id
    assert by_name["engine decode"].parent_span_id == second.span_id
    assert [link.span_id for link in second.links] == [first.span_id]
    assert {span.trace_state for span in spans} == {"vendor=1"}, "kept, but not by the ratio"
    with_tokens = [span for span in spans if any(name.startswith("gen_ai.") for name in read(span))]
    assert with_tokens == [generation], "receivers count each span that has gen_ai attributes"
    attributes = read(generation)
    assert attributes["gen_ai.usage.output_tokens"] == len(TOKENS)
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert "gen_ai.request.seed" not in attributes
    assert read(first)["argosy.attempt.outcome"] == "failure"
    assert read(second)["argosy.attempt.mode"] == "resume"
    assert read(server)["argosy.sampling.reason"] == "attempts"
    for span in spans[1:]:
        assert server.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= server.end_time_unix_nano
    text = b"".join(sink.bodies).replace(f"argosy.request.id{CANARY}".encode(), b"")
    assert text.count(CANARY.encode()) == 1, "the request id, and nothing of the prompt"


@pytest.mark.exhaustive
@pytest.mark.skipif(not PHOENIX.exists(), reason="Phoenix is not installed: make peers/phoenix")
@pytest.mark.parametrize("semconv", ["latest", "1.36"])
async def test_phoenix_shows_one_generation_with_the_tokens_and_the_cost_of_the_ledger(
    tokenizer: Tokenizer, tmp_path: Path, semconv: Literal["latest", "1.36"]
) -> None:
    price = Price(model="big", input=700, cached_input=70, output=3100)
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    async with phoenix(tmp_path) as receiver:
        # Phoenix computes costs by its own prices, in dollars for a million tokens.
        costs = [
            {"tokenType": kind, "costPerMillionTokens": nano_dollars / 1000, "kind": part}
            for kind, nano_dollars, part in (
                ("input", price.input, "PROMPT"),
                ("cache_read", price.cached_input, "PROMPT"),
                ("output", price.output, "COMPLETION"),
            )
        ]
        await query(
            receiver,
            "mutation ($input: CreateModelMutationInput!) {createModel(input: $input) {__typename}}",
            input={"name": "big", "namePattern": "^big$", "costs": costs},
        )
        tracing = TracingConfig(endpoint=str(receiver.base_url), sample_ratio=0, semconv=semconv)
        with open_organisation(url) as accounts:
            accounts.store.limits_and_prices.set_price(price, actor="test")
            key = accounts.key(accounts.project("web"), "all")
            store = StoreConfig(url=url)
            async with run_traced(tokenizer, tracing, crashes=1, store=store) as client:
                headers = {
                    "authorization": f"Bearer {key}",
                    "traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00",
                }
                answer = await client.post("/v1/chat/completions", json=BODY, headers=headers)
                assert parse_stream(answer.text).is_complete
                await until(lambda: accounts.store.ledger.report()[0].requests == 1)
            (ledger,) = accounts.store.ledger.report()
        spans: list[dict[str, Any]] = []
        while len(spans) < 7:
            answer = await receiver.get("/v1/projects/default/spans", params={"limit": 100})
            spans = [each for each in answer.json()["data"] if each["name"] != "argosy.start"]
        assert {each["context"]["trace_id"] for each in spans} == {TRACE_ID}
        (server,) = (each for each in spans if each["name"] == "POST /v1/chat/completions")
        assert server["parent_id"] == CALLER_ID
        (generation,) = (each for each in spans if each["span_kind"] == "LLM")
        assert (generation["name"], generation["parent_id"]) == (
            "chat big",
            server["context"]["span_id"],
        )
        attributes = generation["attributes"]
        assert attributes["llm.model_name"] == "big"
        assert attributes["llm.token_count.prompt"] == ledger.input_tokens
        assert attributes["llm.token_count.completion"] == ledger.output_tokens == len(TOKENS)
        totals: dict[str, Any] = {}
        while not totals or totals["costSummary"]["total"]["cost"] is None:
            found = await query(
                receiver,
                "{projects {edges {node {name tokenCountTotal costSummary {total {cost}}}}}}",
            )
            totals = found["projects"]["edges"][0]["node"]
        assert totals["tokenCountTotal"] == ledger.input_tokens + ledger.output_tokens
        assert 0 < ledger.cached_tokens < ledger.input_tokens
        if semconv == "latest":  # the others have no name for cached tokens
            assert round(totals["costSummary"]["total"]["cost"] * 10**9) == ledger.nano_dollars


async def query(receiver: httpx2.AsyncClient, text: str, **variables: object) -> dict[str, Any]:
    """Send a query of GraphQL to Phoenix, and return the data of its answer."""
    answer = await receiver.post("/graphql", json={"query": text, "variables": variables})
    body: dict[str, Any] = answer.json()
    assert "errors" not in body, body
    data: dict[str, Any] = body["data"]
    return data


async def test_refused_requests_and_the_ratio_decide_alike(tokenizer: Tokenizer) -> None:
    with trace_sink() as sink:
        tracing = TracingConfig(endpoint=sink.url, sample_ratio=0.5, semconv="1.36")
        async with run_traced(tokenizer, tracing) as client:
            for last in ("0" * 14, "f" * 14, "8" + "0" * 13):
                headers = {"traceparent": f"00-{'1' * 18}{last}-{CALLER_ID}-00"}
                response = await client.post("/v1/chat/completions", json=BODY, headers=headers)
                assert response.status_code == 200
            headers = {"traceparent": f"00-{'2' * 32}-{CALLER_ID}-01"}
            body = BODY | {"max_tokens": -7, "temperature": "hot"}
            response = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert response.status_code == 400
            metrics = (await client.get("/metrics")).text
            assert 'argosy_gateway_traces_total{decision="unsampled"} 1' in metrics
        traces = sink.traces()
    assert sorted(traces) == ["1" * 18 + "8" + "0" * 13, "1" * 18 + "f" * 14, "2" * 32]
    assert {span.trace_state for span in traces["1" * 18 + "f" * 14]} == {"ot=th:8"}
    server, generation = traces["2" * 32][:2]
    assert server.status.code == 0, "a client's error is none of the server"
    assert generation.status.code == 2
    assert read(generation)["gen_ai.system"] == "argosy"
    assert "gen_ai.request.stream" not in read(generation)


@pytest.mark.parametrize(
    ("protocol", "refusal"), [("http/protobuf", 503), ("grpc", 503), ("grpc", 429)]
)
async def test_receiver_that_refuses_or_is_away_delays_nothing(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, protocol: str, refusal: int
) -> None:
    with grpc_sink() if protocol == "grpc" else trace_sink() as sink:
        sink.answers.append(refusal)  # to the span of the start
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{sink.url}/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Basic%20abc")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front door")
        tracing = TracingConfig(sample_ratio=1)
        async with run_traced(tokenizer, tracing) as client:
            await until(lambda: sink.headers)
            for _ in range(2):
                response = await client.post("/v1/chat/completions", json=BODY)
                assert parse_stream(response.text).is_complete
            sink.answers.append(413)  # both traces are too large together
        assert len(sink.traces()) == 2, "spans are sent when the gateway stops"
        assert sink.headers[-1]["authorization"] == "Basic abc"
        assert sink.resources[-1]["service.name"] == "front door"
    async with run_traced(tokenizer, TracingConfig(endpoint="http://127.0.0.1:9")) as client:
        assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_batch_whose_answer_is_awaited_at_the_end_is_sent_once(tokenizer: Tokenizer) -> None:
    with trace_sink() as sink:
        tracing = TracingConfig(endpoint=sink.url, sample_ratio=1)
        async with run_traced(tokenizer, tracing) as client:
            await until(lambda: sink.starts)
            sink.hold_s = 0.5
            assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
            await until(lambda: sink.spans)
    ids = [span.span_id for span in sink.spans]
    assert len(ids) == len(set(ids))


INVALID: list[tuple[dict[str, str], str | None, str]] = [
    ({}, None, "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "http://b", "http/protobuf"),
    ({}, "http://user:secret@b", "without a password"),
    ({}, "file:///etc/passwd", "http://"),
    ({"OTEL_EXPORTER_OTLP_TIMEOUT": "10s"}, "http://b", "milliseconds"),
]


@pytest.mark.parametrize(("environment", "endpoint", "problem"), INVALID)
def test_invalid_endpoint_is_refused_at_the_start(
    environment: dict[str, str],
    endpoint: str | None,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = GatewayConfig(models=[], tracing=TracingConfig(endpoint=endpoint))
    with pytest.raises(ValueError, match=problem) as raised:
        GatewayServer(config, lambda _: None)
    assert "secret" not in str(raised.value)
