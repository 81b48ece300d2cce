"""Requests of a run: drawn from clients whose statistics follow published traces, or read from a trace.

Each client sends bursts of its own: gaps between its sessions are gamma-distributed, and its share of the rate is that
of its rank (Zipf). A session has one or more turns, each of which sends the history of the earlier ones again. Prompts
begin with the system prompt of a pool of them. The rate follows the hour of the day.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.bench import TraceRequest, read_trace
from argosy.twin.simulation import derive_stream

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
DAY_S = 86_400.0
DIURNAL_HOURS = (
    (0, 0.9), (3, 0.7), (6, 0.72), (9, 0.95), (12, 1.05), (15, 1.1), (18, 1.3), (20, 1.46), (22, 1.2), (24, 0.9),
)  # fmt: skip
"""Rate by the hour relative to its mean, as of ServeGen's m-small. Between these hours it is linear."""
TRACE_BLOCK_TOKENS = 512
"""Tokens of a block of a trace's prompt, of which equal ones have equal numbers (Mooncake)."""
MAX_REQUESTS = 5_000_000
"""Requests of a run. All of them are held in memory."""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenant of a workload."""

    name: str
    share: Positive = 1.0
    """Share of the sessions, relative to the other tenants."""
    tier: Annotated[int, Meta(ge=0, le=2)] = 1
    weight: Positive = 1.0
    tokens_per_minute: Annotated[int, Meta(ge=1)] | None = None
    concurrency: Annotated[int, Meta(ge=1)] | None = None


class Lengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lognormal distribution of token counts."""

    median: Positive
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.0
    """Standard deviation of the logarithm. 0 gives the same length each time."""
    maximum: Annotated[int, Meta(ge=1)] = 8192

    def draw(self, stream: random.Random) -> int:
        """Draw a length."""
        drawn = self.median * math.exp(stream.gauss(0.0, self.sigma)) if self.sigma else self.median
        return max(1, min(round(drawn), self.maximum))


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of the requests. The defaults are those of chats (Azure 2023, Mooncake)."""

    sessions_per_s: Positive = 1.0
    """Mean rate at which sessions begin. A session is one request, unless it has more turns."""
    clients: Annotated[int, Meta(ge=1, le=100_000)] = 20
    zipf: Annotated[float, Meta(ge=0, le=4)] = 1.0
    """Exponent of the clients' shares of the rate by rank."""
    burstiness: Positive = 0.93
    """Shape of the gamma-distributed gaps of most clients: 1 is a Poisson process, less is burstier."""
    bursty_fraction: Fraction = 0.1
    """Part of the clients with bursts: their shape is a tenth."""
    prompt: Lengths = Lengths(median=757, sigma=0.99)
    """New tokens of each turn."""
    output: Lengths = Lengths(median=151, sigma=0.86, maximum=4096)
    more_turns: Fraction = 0.44
    """Probability that another turn follows."""
    think: Lengths = Lengths(median=39, sigma=2.2, maximum=3600)
    """Seconds between an answer and the next turn."""
    system_prompts: Annotated[int, Meta(ge=0, le=10_000)] = 5
    """Number of system prompts. Clients share them (Zipf)."""
    system_prompt: Lengths = Lengths(median=500, sigma=0.6, maximum=2000)
    diurnal: bool = False
    """Whether the rate follows the hour of the day."""
    day_s: Positive = DAY_S
    """Length of a day for `diurnal`."""
    start_hour: Annotated[float, Meta(ge=0, lt=24)] = 12.0
    leave_fraction: Fraction = 0.02
    """Part of the requests whose client leaves before the end of the answer."""
    tenants: tuple[Tenant, ...] = (Tenant(name="default"),)
    trace: str | None = None
    """Path of a trace (Azure, BurstGPT or Mooncake), which replaces the statistics."""
    trace_speed: Positive = 1.0


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Part of a prompt. Equal spans have equal tokens."""

    seed: int
    tokens: int


class SimulatedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request that a run sends."""

    number: int
    at_s: float | None = None
    """Seconds after the start; None for a turn that follows another one."""
    after: int | None = None
    """Number of the turn that it follows."""
    think_s: float = 0.0
    """Seconds between the end of that turn and this one."""
    tenant: str = "default"
    prompt: tuple[Span, ...]
    """New tokens. A turn that follows another one has its prompt and its answer before them."""
    output_tokens: int
    leave_s: float | None = None
    """Seconds after its arrival at which its client leaves."""


def list_requests(workload: Workload, duration_s: float, seed: int) -> list[SimulatedRequest]:
    """Return the requests of a run, which depend on the arguments and the trace alone.

    Raises:
        BenchError: The trace cannot be read.
        ValueError: There would be too many requests.
    """
    if workload.trace is not None:
        recorded = read_trace(Path(workload.trace), MAX_REQUESTS)
        return convert_trace(workload, recorded, duration_s, seed)
    expected = workload.sessions_per_s * duration_s / max(0.01, 1.0 - workload.more_turns)
    if expected > MAX_REQUESTS:
        raise ValueError(
            f"a run of {duration_s:g} s would have {expected:.0f} requests, more than "
            f"{MAX_REQUESTS}; lower sessions_per_s or duration_s"
        )
    return _Generator(workload, duration_s, seed).generate()


def convert_trace(
    workload: Workload, recorded: Iterable[TraceRequest], duration_s: float, seed: int
) -> list[SimulatedRequest]:
    """Return the requests of a trace, each of which belongs to a tenant that is drawn by its share."""
    stream = derive_stream(seed, "trace")
    tenants, shares = workload.tenants, [tenant.share for tenant in workload.tenants]
    requests = []
    for number, row in enumerate(recorded):
        at_s = row.at_s / workload.trace_speed
        if at_s >= duration_s:
            break
        spans, rest = [], row.input_tokens
        for block in row.block_ids:
            tokens = min(rest, TRACE_BLOCK_TOKENS)
            if tokens > 0:
                spans.append(Span(block, tokens))
            rest -= TRACE_BLOCK_TOKENS
        if rest > 0:
            spans.append(Span(stream.getrandbits(62), rest))
        requests.append(
            SimulatedRequest(
                number=number,
                at_s=round(at_s, 6),
                tenant=stream.choices(tenants, shares)[0].name,
                prompt=tuple(spans),
                output_tokens=row.output_tokens,
            )
        )
    return requests


def prompt_tokens(spans: Sequence[Span]) -> list[int]:
    """Return the token ids of a prompt."""
    tokens: list[int] = []
    for span in spans:
        first = span.seed & 0x3FFFFFFF
        tokens.extend(range(first, first + span.tokens))
    return tokens


def diurnal_rate(hour: float) -> float:
    """Return the rate at an hour of the day relative to its mean."""
    hour %= 24.0
    for (begin, low), (end, high) in itertools.pairwise(DIURNAL_HOURS):
        if hour <= end:
            return low + (high - low) * (hour - begin) / (end - begin)
    raise AssertionError(hour)


class _Generator:
    """Draws the requests of all clients. Times are rounded to microseconds, so that no platform changes them."""

    def __init__(self, workload: Workload, duration_s: float, seed: int) -> None:
        self._workload = workload
        self._duration_s = duration_s
        self._seed = seed
        stream = derive_stream(seed, "system-prompts")
        self._system_prompts = [
            Span(stream.getrandbits(62), workload.system_prompt.draw(stream))
            for _ in range(workload.system_prompts)
        ]
        self._requests: list[SimulatedRequest] = []

    def generate(self) -> list[SimulatedRequest]:
        """Return the requests in the order of their numbers: first by session, then by turn."""
        workload = self._workload
        weights = [(rank + 1.0) ** -workload.zipf for rank in range(workload.clients)]
        total = sum(weights)
        for client, weight in enumerate(weights):
            self._add_client(client, workload.sessions_per_s * weight / total)
        return self._requests

    def _add_client(self, client: int, rate: float) -> None:
        workload = self._workload
        stream = derive_stream(self._seed, f"client-{client}")
        tenant = stream.choices(workload.tenants, [each.share for each in workload.tenants])[0]
        shape = workload.burstiness * (0.1 if stream.random() < workload.bursty_fraction else 1.0)
        system: tuple[Span, ...] = ()
        if self._system_prompts:
            ranks = [1.0 / (rank + 1) for rank in range(len(self._system_prompts))]
            system = tuple(stream.choices(self._system_prompts, ranks))
        at_s = stream.random() * stream.gammavariate(shape, 1.0 / shape) / rate
        while at_s < self._duration_s:
            self._add_session(stream, tenant.name, system, at_s)
            gap_s = stream.gammavariate(shape, 1.0 / shape) / rate
            hour = workload.start_hour + 24.0 * at_s / workload.day_s
            at_s += gap_s / diurnal_rate(hour) if workload.diurnal else gap_s

    def _add_session(
        self, stream: random.Random, tenant: str, system: tuple[Span, ...], at_s: float
    ) -> None:
        workload, after = self._workload, None
        while True:
            new = Span(stream.getrandbits(62), workload.prompt.draw(stream))
            leaves = stream.random() < workload.leave_fraction
            number = len(self._requests)
            self._requests.append(
                SimulatedRequest(
                    number=number,
                    at_s=round(at_s, 6) if after is None else None,
                    after=after,
                    think_s=0.0 if after is None else round(float(workload.think.draw(stream)), 6),
                    tenant=tenant,
                    prompt=(*system, new) if after is None else (new,),
                    output_tokens=workload.output.draw(stream),
                    leave_s=round(5.0 * stream.random(), 6) if leaves else None,
                )
            )
            if stream.random() >= workload.more_turns:
                return
            after = number
