"""Other APIs in front of the chat API: OpenAI Responses and conversations, Anthropic Messages, Ollama.

Each handler translates a request to a chat, sets a translator on the exchange, and calls the handler of chats. So
authentication, limits, queue, routing, failover, ledger and explanations are those of chats. `ResponseState` keeps
responses and conversations in the store, and `BackgroundResponses` runs responses without the client's connection.
"""

from argosy.gateway.dialects.anthropic_handlers import VERSION_HEADER
from argosy.gateway.dialects.dialect import ANTHROPIC, OLLAMA, Dialect, translate_pooling
from argosy.gateway.dialects.dialect_routes import DialectRoutes
from argosy.gateway.dialects.openapi import (
    DIALECT_BODIES,
    DIALECT_TYPES,
    add_dialect_operations,
)
from argosy.gateway.dialects.response_state import ResponseState

__all__ = [
    "ANTHROPIC",
    "DIALECT_BODIES",
    "DIALECT_TYPES",
    "OLLAMA",
    "VERSION_HEADER",
    "Dialect",
    "DialectRoutes",
    "ResponseState",
    "add_dialect_operations",
    "translate_pooling",
]
