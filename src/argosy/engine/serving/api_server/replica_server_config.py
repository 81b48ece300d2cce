"""Settings of the replica server."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from argosy.http_server import TlsConfig
from argosy.model_store import REFERENCE_PREFIX


class ReplicaServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listening address and limits for clients. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    """TCP port. 0 selects a free port, which `on_ready` reports."""
    uds: str | None = None
    """Path of a Unix domain socket to listen on instead of host and port."""
    tls: TlsConfig | None = None
    """TLS settings. None listens without TLS."""
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use. Responses use the first one. Empty means the model's own name."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the checkpoint's template."""
    tool_format: str = "auto"
    """Format of the model's tool calls and reasoning. `auto` detects it, and `none` leaves all output as text."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Whether unknown fields of a request body are ignored and named in a response header, or refused."""
    body_limit_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    """A request whose body is incomplete after this time is rejected."""
    sse_keepalive_interval_s: float = 15.0
    """A stream without output for this time gets a keep-alive comment."""
    slow_reader_timeout_s: float = 30.0
    """A client that reads nothing for this time is disconnected."""
    drain_deadline_s: float = 30.0
    """Time that running requests have to finish after SIGTERM."""
    retry_after_s: float = 1.0
    """`Retry-After` of responses when the replica accepts no requests."""
    vllm_metrics: bool = False
    """Whether `/metrics` also includes vLLM's metric names."""
    zone: str = ""
    """Failure domain of this replica, such as a rack or an availability zone. Part of the load report."""
    labels: dict[str, str] = {}
    """Labels of this replica for operators. Part of the load report."""
    log_format: Literal["json", "console"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_name: str = ""
    """Name of this replica in the log, if several processes share one log."""

    def model_names_for(self, model: str) -> tuple[str, ...]:
        """Return the configured names, or that of the directory, file, hub repository or stored version."""
        path = Path(model)
        own_name = model
        if model.startswith(REFERENCE_PREFIX):
            own_name = model.removeprefix(REFERENCE_PREFIX).partition(":")[0]
        elif path.exists():
            own_name = path.resolve().name.removesuffix(".gguf")
        return self.served_model_names or (own_name,)
