"""Load reports of native replicas."""

from __future__ import annotations

import msgspec

from argosy.protocol import LoadResponse


def load_report(**fields: object) -> LoadResponse:
    """Return the load report of an idle replica with these fields."""
    counts = (
        *("server_load", "running", "waiting", "queued_tokens", "max_seqs", "max_model_len"),
        *("block_size", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached", "step"),
    )
    idle = dict.fromkeys(counts, 0) | {"state": "ready", "models": ["m"], "step_s": 0.0}
    return msgspec.convert(idle | fields, LoadResponse)
