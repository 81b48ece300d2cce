"""Metrics and structured logs of gateways and replicas.

`GatewayMetrics` and `ReplicaMetrics` count events with the classes of `instruments` on one event loop. A scrape renders
the counts in the Prometheus text format, together with gauges that are read at that moment (`GatewayGauges`,
`CoreStats`). Concurrent scrapes share one rendering (`CoalescedScrape`). Replicas offer the same numbers under vLLM's
metric names. Logging is set up once with `configure_logging`, and `bind_request` adds the request id to each event.
A `RepeatedWarning` bounds how often a problem is logged. `parse_log`, `LogSelection` and `LogFormatter` read what was
logged.
"""

from argosy.telemetry.core_stats import CoreStats
from argosy.telemetry.gateway_metrics import (
    BACKUP_GAUGES,
    GatewayGauges,
    GatewayMetrics,
    QuotaBackendGauges,
    ReplicaGauges,
)
from argosy.telemetry.instruments import METRICS_CONTENT_TYPE, CoalescedScrape
from argosy.telemetry.log_lines import (
    LogFormatter,
    LogLevel,
    LogLine,
    LogSelection,
    find_new_lines,
    parse_log,
)
from argosy.telemetry.log_redaction import redact_log
from argosy.telemetry.logs import LogFormat, bind_request, configure_logging
from argosy.telemetry.otlp import (
    AttributeValue,
    Span,
    SpanEvent,
    SpanKind,
    encode_request,
    encode_spans,
)
from argosy.telemetry.repeated_warning import RepeatedWarning
from argosy.telemetry.replica_metrics import ReplicaMetrics, SequenceTimes, SleepStats
