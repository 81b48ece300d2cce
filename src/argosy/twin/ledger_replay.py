"""Replay of the ledger: requests that gateways have served, as requests of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from argosy.twin.workload import SimulatedRequest, Span, Tenant

if TYPE_CHECKING:
    from argosy.store import UsageRecord

DEFAULT_TENANT = "default"


def convert_records(
    records: Iterable[UsageRecord],
) -> tuple[tuple[SimulatedRequest, ...], tuple[Tenant, ...]]:
    """Return the requests of the ledger with their times and lengths, and a tenant for each organisation.

    Records without output are left out, since nothing is known of their prompts. The cached tokens of a prompt are its
    beginning, which the requests of one key share.
    """
    rows = sorted(
        (row for row in records if row.output_tokens > 0),
        key=lambda row: (row.started_at, row.request),
    )
    tenants = sorted({row.organisation or DEFAULT_TENANT for row in rows})
    requests = []
    for number, row in enumerate(rows):
        cached = min(row.cached_tokens, row.input_tokens)
        spans = [
            Span(_seed(f"{row.organisation}/{row.key}"), cached),
            Span(_seed(row.request), max(1, row.input_tokens - cached)),
        ]
        requests.append(
            SimulatedRequest(
                number=number,
                at_s=round(row.started_at - rows[0].started_at, 6),
                tenant=row.organisation or DEFAULT_TENANT,
                prompt=tuple(span for span in spans if span.tokens),
                output_tokens=row.output_tokens,
            )
        )
    return tuple(requests), tuple(Tenant(name=name) for name in tenants)


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
