"""How the servers behind the gateway differ: health, load, fields, and how their answers are carried on."""

from argosy.gateway.dialects.asking import resumed, resumed_tokens, sent_salt, shows_ids
from argosy.gateway.dialects.catalog import dialect_of
from argosy.gateway.dialects.continuation import Carrier, Leg, whole_request
from argosy.gateway.dialects.dialect import (
    CHAT_PATH,
    COMPLETION_PATH,
    Carry,
    Dialect,
    Kind,
    LoadSource,
    Reading,
)
from argosy.gateway.dialects.events import UNREADABLE, check_objects, message_of, status_meant
from argosy.gateway.dialects.finding import Found, find
from argosy.gateway.dialects.journal import Delivered
from argosy.gateway.dialects.kv_sources import KvAddress, KvSource
from argosy.gateway.dialects.opening import Opening
from argosy.gateway.dialects.passing import (
    Identity,
    Usage,
    endings_of,
    is_object,
    status_within,
    tokens_within,
    usage_of,
)
from argosy.gateway.dialects.reader import StreamReader

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
