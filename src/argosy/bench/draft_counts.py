"""Counts of a server's speculative decoding, read from its metrics before and after a run."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple
from urllib.parse import quote

from argosy.bench.client import BenchClient
from argosy.bench.response import JsonResponse

MAX_REPLICAS = 64
"""Maximum number of replicas behind a gateway whose metrics are read."""
_FAMILIES = (
    (
        b"argosy_generation_tokens",
        b"argosy_draft_tokens",
        b"argosy_accepted_draft_tokens",
        b"argosy_draft_gain_seconds",
        b"argosy_draft_cost_seconds",
    ),
    (
        b"vllm:generation_tokens",
        b"vllm:spec_decode_num_draft_tokens",
        b"vllm:spec_decode_num_accepted_tokens",
    ),
)
"""Names of the counters in Argosy and in vLLM, which counts no seconds."""
_REPLICA = re.compile(
    rb'^argosy_gateway_replica_requests_in_flight\{[^}\n]*replica="([^"\\\n]+)"', re.MULTILINE
)


class DraftCounts(NamedTuple):
    """Tokens since the start of the server, or during a run."""

    generated: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    gain_s: float = 0.0
    """Seconds of steps that requests did not wait for, because drafts were accepted."""
    cost_s: float = 0.0
    """Seconds that requests waited longer for steps, because of drafts."""

    @property
    def tokens_per_step(self) -> float | None:
        """Mean tokens that a step generated of a sequence. None if nothing was drafted."""
        steps = self.generated - self.accepted
        return self.generated / steps if self.drafted > 0 and steps > 0 else None

    @property
    def acceptance(self) -> float | None:
        """Share of the drafts that were accepted. None if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted > 0 else None

    @property
    def saved_s(self) -> float | None:
        """Seconds that drafts saved all requests together. None if nothing was drafted, or no seconds are known."""
        return self.gain_s - self.cost_s if self.drafted > 0 and self.cost_s > 0 else None

    def since(self, earlier: DraftCounts) -> DraftCounts:
        """Return the tokens since an earlier reading. None of a server that was started again count."""
        differences = [now - before for now, before in zip(self, earlier, strict=True)]
        return DraftCounts(*differences) if min(differences) >= 0 else DraftCounts()


async def read_draft_counts(client: BenchClient) -> DraftCounts:
    """Read the counts of a replica, or those of all replicas behind a gateway. They are 0 if they cannot be read."""
    text = await _read_metrics(client, "/metrics")
    names = dict.fromkeys(_REPLICA.findall(text))
    paths = [f"/replicas/{quote(name.decode(), safe='')}/metrics" for name in names]
    texts = await asyncio.gather(*(_read_metrics(client, path) for path in paths[:MAX_REPLICAS]))
    counts = [_parse_counts(each) for each in (text, *texts)]
    return DraftCounts(*map(sum, zip(*counts, strict=True)))


async def _read_metrics(client: BenchClient, path: str) -> bytes:
    response = await client.get(path, JsonResponse())
    return response.body if response.status == 200 else b""


def _parse_counts(text: bytes) -> DraftCounts:
    """Return the counts of Argosy's names, or else those of vLLM's."""
    for families in _FAMILIES:
        counts = DraftCounts(*(_sum_counter(text, family) for family in families))
        if counts.generated:
            return counts
    return DraftCounts()


def _sum_counter(text: bytes, family: bytes) -> float:
    samples = re.findall(
        rb"^%b_total(?:\{.*\})? ([0-9.e+-]+)$" % re.escape(family), text, re.MULTILINE
    )
    return sum(map(float, samples))
