"""Backends: how the gateway speaks with each kind of server that can be a replica.

A `BackendAdapter` describes one kind as data: endpoints, request fields, and ways to resume its streams. `catalog`
holds the adapters, and `detect_backend` finds the kind of an unknown server. For each attempt at a streamed response,
a `StreamContinuation` plans a body from `request_builder` and a `StreamParser`. The parser turns the server's events
into what the client receives and records it in `DeliveredOutput`, from which the next server resumes. Native streams,
other resumable streams and streams that cannot be resumed have a parser each. For whole responses, `usage` and
`response_status` read the tokens and the outcome from the body.
"""

from argosy.deployment import BackendKind, KvEventAddress, ResumeMode
from argosy.gateway.backends.backend_adapter import (
    CHAT_PATH,
    COMPLETION_PATH,
    BackendAdapter,
    KvEventPorts,
    LoadReport,
    ReportSource,
)
from argosy.gateway.backends.catalog import DetectedBackend, detect_backend, get_adapter
from argosy.gateway.backends.constraint_fields import CONSTRAINT_FIELDS
from argosy.gateway.backends.passthrough import ResponseIdentity
from argosy.gateway.backends.request_builder import (
    UpstreamTarget,
    count_resume_tokens,
    derive_cache_salt,
    is_set,
    is_token_ids_requested,
    list_dropped_fields,
    resume_token_counts,
    translate_constraint,
)
from argosy.gateway.backends.response_body import (
    ResponseBody,
    is_json_object,
    normalize_calls,
    parse_response_body,
)
from argosy.gateway.backends.stream_continuation import (
    StreamContinuation,
    UpstreamPlan,
    build_nonstreaming_body,
)
from argosy.gateway.backends.stream_events import (
    MALFORMED_EVENT_ERRORS,
    FirstContentDetector,
    check_container_count,
    infer_status,
    parse_error_message,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.backends.usage import cap_usage, find_max_usage
