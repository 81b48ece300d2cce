"""How the servers behind the gateway differ: health, load, fields, and how their answers are carried on."""

from argosy.gateway.backends.backend_adapter import (
    CHAT_PATH,
    COMPLETION_PATH,
    Carry,
    Dialect,
    Kind,
    LoadSource,
    Reading,
)
from argosy.gateway.backends.catalog import dialect_of
from argosy.gateway.backends.detection import Found, find
from argosy.gateway.backends.first_content import Opening
from argosy.gateway.backends.kv_event_sources import KvAddress, KvSource
from argosy.gateway.backends.native_stream_parser import Delivered
from argosy.gateway.backends.passthrough import (
    Identity,
    Usage,
    endings_of,
    is_object,
    status_within,
    tokens_within,
    usage_of,
)
from argosy.gateway.backends.request_builder import resumed, resumed_tokens, sent_salt, shows_ids
from argosy.gateway.backends.stream_continuation import Carrier, Leg, whole_request
from argosy.gateway.backends.stream_events import (
    UNREADABLE,
    check_objects,
    message_of,
    status_meant,
)
from argosy.gateway.backends.stream_parser import StreamReader

__all__ = [
    "CHAT_PATH",
    "COMPLETION_PATH",
    "UNREADABLE",
    "Carrier",
    "Carry",
    "Delivered",
    "Dialect",
    "Found",
    "Identity",
    "Kind",
    "KvAddress",
    "KvSource",
    "Leg",
    "LoadSource",
    "Opening",
    "Reading",
    "StreamReader",
    "Usage",
    "check_objects",
    "dialect_of",
    "endings_of",
    "find",
    "is_object",
    "message_of",
    "resumed",
    "resumed_tokens",
    "sent_salt",
    "shows_ids",
    "status_meant",
    "status_within",
    "tokens_within",
    "usage_of",
    "whole_request",
]
