"""The replica server's settings: plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from argosy.http_server import TlsConfig


class ReplicaServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the replica listens and how it treats its clients. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port; `on_ready` tells which."""
    uds: str | None = None
    """Path of a Unix domain socket to listen on instead of host and port."""
    tls: TlsConfig | None = None
    """Listen over TLS."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; the first is the one in answers. Empty: the model's own name."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the checkpoint's."""
    body_limit_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    """A request whose body is not complete after this long is refused."""
    sse_keepalive_interval_s: float = 15.0
    """A stream that is silent for this long carries a comment."""
    slow_reader_timeout_s: float = 30.0
    """A client that takes nothing for this long is cut off."""
    drain_deadline_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    retry_after_s: float = 1.0
    """What clients are told to wait when the replica cannot take a request now."""
    vllm_metrics: bool = False
    """`/metrics` also shows vLLM's metric names."""
    log_format: Literal["json", "console"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_name: str = ""
    """What the log calls this replica, where several write to one."""

    def model_names_for(self, model: str) -> tuple[str, ...]:
        """Names for `model`: those set, or its own (a directory's last part, a hub repository's name)."""
        path = Path(model)
        own = path.resolve().name if path.is_dir() else model
        return self.served_model_names or (own,)
