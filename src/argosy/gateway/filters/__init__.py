"""Request filters: the steps that every generation request passes before and after its dispatch to a replica.

Each filter's `on_request` may admit, answer or reject a request. Its other methods are called for each batch of tokens
and once when the request ends. What it keeps of a request is in the `RequestContext`. The `TelemetryFilter` records the
trace and the metrics. An `IdempotencyFilter` replays the response of an earlier request with the same idempotency key.
A `ContentFilter` applies the content rule of a request to its prompt, and a `TruncationFilter` makes it shorter.
The `LimitFilter` reserves the expected usage of
the limits that apply, and `UsageRecorder` writes the actual usage and
cost to the usage log. A background task, `flush_usage_forever`, moves finished rows from the usage log to the store.
"""

from argosy.deployment import LimitsConfig
from argosy.gateway.filters.content_filter import ContentFilter
from argosy.gateway.filters.idempotency_filter import (
    IDEMPOTENCY_KEY_HEADER,
    IdempotencyFilter,
    check_existing_claim,
    scope_key,
)
from argosy.gateway.filters.limit_filter import LimitFilter, read_redis_password
from argosy.gateway.filters.telemetry_filter import TelemetryFilter
from argosy.gateway.filters.truncation_filter import TruncationFilter
from argosy.gateway.filters.usage_recorder import (
    UsageRecorder,
    begin_usage_row,
    flush_usage_forever,
)
