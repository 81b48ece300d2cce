"""Gateway that records usage, and its usage rows, metrics and traces."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.deployment import ReplicaConfig
from argosy.gateway.filters import LimitFilter, UsageRecorder
from argosy.gateway.request_context import RequestFilter
from argosy.series import Readings, compute_metrics, read_series
from argosy.store import AccountSnapshot, LocalQuotaBackend, Price, UsageLog, UsageRecord
from tests.integration.test_metrics import samples
from tests.support.gateway_harness import GatewayHarness, run_gateway

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
PROMPT = "Tell me a story of forty bytes or so, please"
PRICE = Price(model="big", input=5, cached_input=1, output=20)


@dataclass(frozen=True)
class MeteredGateway:
    """Running gateway and the usage log that it writes."""

    running: GatewayHarness
    usage_log: UsageLog

    async def post(self, path: str = COMPLETIONS, **fields: Any) -> str:  # noqa: ANN401 - fields of a request
        """Send a request with these fields and return the response body."""
        messages = {"messages": [{"role": "user", "content": PROMPT}]}
        prompt = {"prompt": PROMPT} if path == COMPLETIONS else messages
        body = {"model": "big", "max_tokens": 30} | prompt | fields
        response = await self.running.client.post(path, json=body)
        return response.text

    def usage_record(self) -> UsageRecord:
        """Return the only record in the usage log."""
        (record,) = self.usage_records()
        return record

    def usage_records(self) -> list[UsageRecord]:
        """Remove all records from the usage log and return them."""
        records: list[UsageRecord] = []
        self.usage_log.drain(records.extend)
        return records

    def trace_dict(self, record: UsageRecord) -> dict[str, Any]:
        """Return the trace of a request as `argosy explain` shows it."""
        trace = self.running.traces.find(record.request)
        assert trace is not None
        return trace.to_dict()

    async def metric_sum(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels, or 0 without such samples."""
        text = (await self.running.client.get("/metrics")).text
        full_name = f"argosy_gateway_{name}"
        return sum(
            value
            for sample, sample_labels, value in samples(text)
            if sample == full_name and labels.items() <= sample_labels.items()
        )

    def series_sums(self) -> list[float]:
        """Return input, cached and output tokens and cost of the time series, after closing the current second."""
        recorder, begin = self.running.series, 1_800_000_000
        second = max(begin, recorder.last_second + 1)
        list(recorder.close_second(second, Readings(fleet=(0.0,) * 5)))
        frame = read_series(recorder, "fleet", begin, 1, second + 1 - begin, ())
        names = ("input_tokens", "cached_tokens", "output_tokens", "cost_nano_dollars")
        metrics = compute_metrics("fleet", names, frame)
        return [sum(value for value in metrics[name] if value is not None) for name in names]

    async def assert_consistent(self) -> UsageRecord:
        """Check that metrics, trace and price agree with the only usage record, and return the record."""
        record = self.usage_record()
        kinds = ("input", "cached", "output")
        counted = [await self.metric_sum("tokens_total", kind=kind) for kind in kinds]
        uncached = record.input_tokens - record.cached_tokens
        assert counted == [uncached, record.cached_tokens, record.output_tokens]
        assert round(await self.metric_sum("cost_dollars_total") * 1e9) == record.nano_dollars
        assert self.series_sums() == [*counted, record.nano_dollars]
        tokens = self.trace_dict(record)["tokens"]
        assert (tokens["prompt"], tokens["cached"], tokens["output"]) == (
            record.input_tokens,
            record.cached_tokens,
            record.output_tokens,
        )
        assert record.nano_dollars == (
            uncached * PRICE.input
            + record.cached_tokens * PRICE.cached_input
            + record.output_tokens * PRICE.output
        )
        return record


@contextlib.asynccontextmanager
async def run_metered_gateway(
    folder: Path,
    *urls: str,
    **settings: Any,  # noqa: ANN401 - arguments of `front`
) -> AsyncIterator[MeteredGateway]:
    """Run a gateway in front of servers that serve one request at a time."""
    replicas = [ReplicaConfig(url=url, max_requests=1) for url in urls]
    async with run_gateway_before(folder, *replicas, **settings) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def run_gateway_before(
    folder: Path,
    *replicas: ReplicaConfig,
    **settings: Any,  # noqa: ANN401 - arguments of `front`
) -> AsyncIterator[MeteredGateway]:
    """Run a gateway in front of these replicas."""
    usage_log = UsageLog(folder)
    limits = LimitFilter(LocalQuotaBackend())
    limits.apply_snapshot(AccountSnapshot(prices=(PRICE,)))
    filters: list[RequestFilter] = [limits, UsageRecorder(usage_log)]
    async with run_gateway(filters, *replicas, **settings) as running:
        yield MeteredGateway(running, usage_log)
    usage_log.close()
